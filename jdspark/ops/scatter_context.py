from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .checks import Layout
from .latent_pool import write_latents


def scatter_context(
    pool: jax.Array,
    latents: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    *,
    layout: Layout = "layer_major",
    backend: str = "xla",
) -> jax.Array:
    """Write each token's latents, every layer, at page `block_tables[rows, positions // P]`, offset `positions % P`.

    Args:
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        latents: `[N, L, D]` in the pool's dtype.
        rows, positions: `[N]` int32. Destinations are distinct by contract; should two coincide, the later token wins.
        block_tables: `[rows, max_blocks]` int32.

    Returns:
        The pool. A token whose row, position or page lies outside the table or the pool writes nothing (padding tokens
        use row -1).

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.scatter_context(pool, latents, rows, positions, block_tables, layout)
    if backend != "xla":
        return kernel("scatter_context", backend)(pool, latents, rows, positions, block_tables, layout=layout)
    if rows.shape[0] == 0:
        return pool

    num_rows, max_blocks = block_tables.shape
    page_size = pool.shape[2]
    rows, positions = jnp.asarray(rows), jnp.asarray(positions)
    column = positions // page_size
    inside = (rows >= 0) & (rows < num_rows) & (column >= 0) & (column < max_blocks)
    page = jnp.asarray(block_tables)[jnp.where(inside, rows, 0), jnp.where(inside, column, 0)]
    page = jnp.where(inside, page, -1)
    return write_latents(pool, jnp.asarray(latents), page, positions % page_size, layout)
