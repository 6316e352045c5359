from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .bits import as_bits, from_bits, times_zero
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

    ctx_len = jnp.asarray(ctx_len)
    block_tables = gen_slice(block_tables, first_row, num_gen)
    block_counts = safe_block_counts(gen_slice(block_counts, first_row, num_gen), block_tables.shape[1])
    n = safe_num_accepted(num_accepted, K)
    c = ctx_len[safe_slots(slots, ctx_len)]

    j = jnp.arange(K + 1, dtype=jnp.int32)
    last = (block_counts * page_size - 1)[:, None]
    # min(c, last) first: the same number, and c + j cannot overflow
    column = jnp.maximum(jnp.minimum(jnp.minimum(c[:, None], last) + j, last), 0)
    page = jnp.take_along_axis(block_tables, column // page_size, axis=1)
    page = jnp.where(block_counts[:, None] == 0, -1, page)
    accepted = (j < n[:, None]).reshape(-1, 1, 1)
    latents = jnp.asarray(latents)
    values = from_bits(jnp.where(accepted, as_bits(latents), times_zero(latents)), latents.dtype)
    return write_latents(pool, values, page.reshape(-1), (column % page_size).reshape(-1), layout)
