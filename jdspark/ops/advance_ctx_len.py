from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .safety import gen_slice, safe_slots


def advertised_ctx_len(
    ctx_len: jax.Array, slots: jax.Array, block_counts: jax.Array, *, page_size: int, block_size: int, max_ctx: int
) -> jax.Array:
    """`min(ctx_len[slot], max(block_counts * P - block_size, 0))` for gen rows `[B]`: what the block may attend to.

    The block's own latents are written at `advertised .. advertised + block_size - 1`, hence the room for them: one page
    short and the first of them would land on another request's page.
    """
    # more pages than max_ctx and the block fill change nothing; the clip keeps the product inside int32
    block_counts = jnp.clip(block_counts, 0, (max_ctx + block_size) // page_size + 1)
    allocated = jnp.maximum(block_counts * page_size - block_size, 0)
    return jnp.minimum(ctx_len[safe_slots(slots, ctx_len)], allocated)


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
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Count the accepted tokens in, and say how much context the drafter may read.

    Adds `num_accepted[b]` to each gen request's slot, clamps every slot to `max_ctx`, sets the dummy slot (the last) to
    0, in that order. Requests that share a slot all add to it.

    Args:
        ctx_len: `[max_batch + 1]` int32.
        slots, num_accepted: `[B]` int32; a count below 1 counts as 1. K is not known here: a count above
            K+1 (no `accept_strict` returns one) is bounded by `max_ctx` alone.
        block_counts: `[rows]` int32, pages each row owns.
        page_size, block_size, max_ctx: static.
        first_row: the first gen request's row in `block_counts` (= num_contexts), static.

    Returns:
        ctx_len: `[max_batch + 1]` int32.
        advertised: `[B]` int32, `min(ctx_len[slot], max(block_counts[row]*P - block_size, 0))`.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a static number out of range.
    """
    contracts.advance_ctx_len(ctx_len, slots, num_accepted, block_counts, page_size, block_size, max_ctx, first_row)
    if backend != "xla":
        return kernel("advance_ctx_len", backend)(
            ctx_len, slots, num_accepted, block_counts,
            page_size=page_size, block_size=block_size, max_ctx=max_ctx, first_row=first_row,
        )  # fmt: skip

    num_gen = slots.shape[0]
    ctx_len = jnp.asarray(ctx_len)
    n = jnp.clip(num_accepted, 1, max_ctx)  # more than max_ctx changes nothing; the clip keeps the sum inside int32
    # clamped before as well as after the add, for the same reason
    ctx_len = jnp.minimum(ctx_len, max_ctx).at[safe_slots(slots, ctx_len)].add(n)
    ctx_len = jnp.minimum(ctx_len, max_ctx).at[-1].set(0)
    advertised = advertised_ctx_len(
        ctx_len,
        slots,
        gen_slice(block_counts, first_row, num_gen),
        page_size=page_size,
        block_size=block_size,
        max_ctx=max_ctx,
    )
    return ctx_len, advertised
