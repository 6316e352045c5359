from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .bits import keep_or_zero
from .checks import Layout
from .latent_pool import write_latents
from .safety import gen_slice, safe_block_counts, safe_num_accepted, safe_slots


def store_gen_context(
    pool: jax.Array,
    latents: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    num_accepted: jax.Array,
    block_tables: jax.Array,
    block_counts: jax.Array,
    *,
    layout: Layout = "layer_major",
    first_row: int = 0,
    backend: str = "xla",
) -> jax.Array:
    """Store the verified tokens' latents in every layer's pages of their request.

    Token j of request b goes to column `q = max(min(ctx_len[slots[b]] + j, block_counts[row]*P - 1), 0)`, that is page
    `block_tables[row, q // P]`, offset `q % P`, with `row = first_row + b`. An accepted token (`j < num_accepted[b]`)
    is copied bit for bit, a rejected one writes its product with zero. A row that owns no page writes nothing.

    Args:
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        latents: `[B*(K+1), L, D]` in the pool's dtype.
        ctx_len: `[max_batch + 1]` int32, before this step's advance.
        slots, num_accepted: `[B]` int32.
        block_tables: `[rows, max_blocks]` int32; a page outside the pool is not written.
        block_counts: `[rows]` int32, clipped to `[0, max_blocks]`.
        first_row: the first gen request's row (= num_contexts), static.

    Returns:
        The pool; everything not named above is untouched. Writes act in (b, j) order, the last on a place wins.

    Raises:
        TypeError, ValueError: wrong dtype or shape, or gen rows past the block tables.
    """
    K = contracts.store_gen_context(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout, first_row)
    if backend != "xla":
        return kernel("store_gen_context", backend)(
            pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout=layout, first_row=first_row
        )
    num_gen, page_size = slots.shape[0], pool.shape[2]
    if num_gen == 0:
        return pool

    block_tables, block_counts = (gen_slice(x, first_row, num_gen) for x in (block_tables, block_counts))
    pages, offsets = store_destinations(ctx_len, slots, block_tables, block_counts, K=K, page_size=page_size)
    accepted = jnp.arange(K + 1) < safe_num_accepted(num_accepted, K)[:, None]
    values = keep_or_zero(accepted.reshape(-1, 1, 1), jnp.asarray(latents))
    return write_latents(pool, values, pages.reshape(-1), offsets.reshape(-1), layout)


def store_destinations(
    ctx_len: jax.Array, slots: jax.Array, block_tables: jax.Array, block_counts: jax.Array, *, K: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Pages and offsets `[B, K+1]` of the verified tokens, from the gen rows' tables; page -1 where a row owns no page."""
    ctx_len = jnp.asarray(ctx_len)
    block_counts = safe_block_counts(block_counts, block_tables.shape[1])
    c = ctx_len[safe_slots(slots, ctx_len)]
    last = (block_counts * page_size - 1)[:, None]
    # min(c, last) first: the same number, and c + j cannot overflow
    column = jnp.minimum(jnp.minimum(c[:, None], last) + jnp.arange(K + 1, dtype=jnp.int32), last)
    column = jnp.maximum(column, 0)
    page = jnp.take_along_axis(block_tables, column // page_size, axis=1)
    return jnp.where(block_counts[:, None] == 0, -1, page), column % page_size
