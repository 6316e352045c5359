from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdspark.ops import Prologue

from .launch import Ref, launch, struct


def slot_of(slots: Ref, b: jax.Array, num_slots: int) -> jax.Array:
    """Request b's slot; outside the table it is the dummy, the last."""
    slot = slots[b]
    return jnp.where((slot < 0) | (slot >= num_slots), jnp.int32(num_slots - 1), slot)


@functools.partial(jax.jit, static_argnames=("block_size", "max_ctx", "mask_token_id"))
def gen_prologue(
    accepted_tokens: jax.Array,
    num_accepted: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    *,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
) -> Prologue:
    """`[B, K+1]`, `[B]`, `[max_batch + 1]`, `[B]` -> Prologue. One launch, one program per request."""
    num_gen, width = accepted_tokens.shape
    num_slots = ctx_len.shape[0]
    if num_gen == 0:
        return Prologue(
            jnp.zeros(0, jnp.int32),
            jnp.zeros((0, block_size), jnp.int32),
            jnp.zeros((0, width), jnp.int32),
            jnp.full(1, mask_token_id, jnp.int32),
        )

    def gen_prologue_kernel(
        accepted: Ref,
        num_accepted: Ref,
        ctx_len: Ref,
        slots: Ref,
        bonus: Ref,
        query_positions: Ref,
        context_positions: Ref,
        embedding_ids: Ref,
    ) -> None:
        b = lax.axis_index("request")
        write_prologue(
            b, accepted, num_accepted[b], ctx_len[slot_of(slots, b, num_slots)],
            bonus, query_positions, context_positions, embedding_ids, max_ctx,
        )  # fmt: skip

        @pl.when(b == 0)
        def _mask() -> None:
            embedding_ids[num_gen] = jnp.int32(mask_token_id)

    outputs = launch(
        gen_prologue_kernel,
        out_type=(
            struct((num_gen,), jnp.int32),
            struct((num_gen, block_size), jnp.int32),
            struct((num_gen, width), jnp.int32),
            struct((num_gen + 1,), jnp.int32),
        ),
        grid={"request": num_gen},
    )(accepted_tokens, num_accepted, ctx_len, slots)
    return Prologue(*outputs)


def write_prologue(
    b: jax.Array,
    accepted: Ref,
    num_accepted: jax.Array,
    c: jax.Array,
    bonus: Ref,
    query_positions: Ref,
    context_positions: Ref,
    embedding_ids: Ref,
    max_ctx: int,
) -> None:
    """Request b's row of all four outputs; `num_accepted` and `c` are its scalars."""
    width, block_size = context_positions.shape[1], query_positions.shape[1]
    n = jnp.clip(num_accepted, 1, width)
    token = accepted[b, n - 1]
    bonus[b] = token
    embedding_ids[b] = token
    # min(c, max_ctx) first: the same number, and c + n cannot overflow
    block_start = jnp.minimum(jnp.minimum(c, max_ctx) + n, max_ctx)
    for j in range(block_size):
        query_positions[b, j] = block_start + j
    for j in range(width):
        context_positions[b, j] = c + j
