from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .gen_prologue import slot_of
from .launch import Ref, launch, pieces, struct, total


def advanced(slot: jax.Array, ctx_len: Ref, slots: Ref, num_accepted: Ref, max_ctx: int) -> jax.Array:
    """The new context length of one slot: every request that holds it adds its count."""
    num_slots, num_gen = ctx_len.shape[0], slots.shape[0]
    # clamped before as well as after the add: the sum stays inside int32
    length = jnp.minimum(ctx_len[slot], max_ctx)
    for piece in pieces(num_gen, jnp.int32):
        n = jnp.minimum(jnp.maximum(piece.load(num_accepted), 1), max_ctx)
        mine = piece.load(slots) == slot
        if piece.fresh != piece.start:
            mine &= piece.positions() >= piece.fresh
        length += total(jnp.where(mine, n, 0))
    # requests outside the table share the dummy, whose length is 0 whatever they add
    return jnp.where(slot == num_slots - 1, 0, jnp.minimum(length, max_ctx))


def advertised(length: jax.Array, block_count: jax.Array, *, page_size: int, block_size: int, max_ctx: int) -> jax.Array:
    """How much of a context the block may attend to, so that its own latents still fit into the pages."""
    # more pages than max_ctx and the block fill change nothing; the clip keeps the product inside int32
    block_count = jnp.clip(block_count, 0, (max_ctx + block_size) // page_size + 1)
    return jnp.minimum(length, jnp.maximum(block_count * page_size - block_size, 0))


@functools.partial(jax.jit, static_argnames=("page_size", "block_size", "max_ctx", "first_row"))
def advance_ctx_len(
    ctx_len: jax.Array,
    slots: jax.Array,
    num_accepted: jax.Array,
    block_counts: jax.Array,
    *,
    page_size: int,
    block_size: int,
    max_ctx: int,
    first_row: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`[max_batch + 1]`, `[B]`, `[B]`, `[rows]` -> ctx_len `[max_batch + 1]`, advertised `[B]`.

    One launch, one program per slot and one per request; a request's program computes its slot's new length again.
    """
    num_slots, num_gen = ctx_len.shape[0], slots.shape[0]
    if num_gen == 0:
        return jnp.minimum(ctx_len, max_ctx).at[-1].set(0), jnp.zeros(0, jnp.int32)

    def advance_ctx_len_kernel(
        ctx_len: Ref, slots: Ref, num_accepted: Ref, block_counts: Ref, new_ctx_len: Ref, advertised_lengths: Ref
    ) -> None:
        program = lax.axis_index("slot_or_request")
        b = jnp.maximum(program - num_slots, 0)
        slot = jnp.where(program < num_slots, program, slot_of(slots, b, num_slots))
        length = advanced(slot, ctx_len, slots, num_accepted, max_ctx)

        @pl.when(program < num_slots)
        def _slot() -> None:
            new_ctx_len[slot] = length

        @pl.when(program >= num_slots)
        def _request() -> None:
            advertised_lengths[b] = advertised(
                length, block_counts[first_row + b], page_size=page_size, block_size=block_size, max_ctx=max_ctx
            )

    return launch(
        advance_ctx_len_kernel,
        out_type=(struct((num_slots,), jnp.int32), struct((num_gen,), jnp.int32)),
        grid={"slot_or_request": num_slots + num_gen},
    )(ctx_len, slots, num_accepted, block_counts)
