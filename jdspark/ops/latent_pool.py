"""Writing latents into the paged pool: the one place where an order between writes is decided."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .checks import Layout

PAIRWISE = 1024
"""Up to this many entries are compared with one another, more of them through a table of the pool's places."""


def overwritten(destinations: jax.Array, num_places: int) -> jax.Array:
    """`[N]` bool: entry i is true if a later entry has the same destination in `[0, num_places)`."""
    order = jnp.arange(destinations.shape[0], dtype=jnp.int32)
    if destinations.shape[0] <= PAIRWISE:
        same = destinations[:, None] == destinations[None, :]
        return jnp.any(same & (order[:, None] < order[None, :]), axis=1)
    last = jnp.full(num_places, -1, jnp.int32).at[destinations].max(order, mode="drop")
    return last.at[destinations].get(mode="fill", fill_value=-1) > order


def write_latents(
    pool: jax.Array, latents: jax.Array, pages: jax.Array, offsets: jax.Array, layout: Layout, layer: int | None = None
) -> jax.Array:
    """Write `latents [N, L, D]` (`[N, D]` for a single `layer`) at `pages [N]`, `offsets [N]`.

    Writes act in row order, so where two land on the same place the last one wins: XLA leaves that open, so the losers
    are dropped first. A page outside the pool, or an offset outside its page, writes nothing.
    """
    pool = jnp.asarray(pool)
    num_pages = pool.shape[1] if layout == "layer_major" else pool.shape[0]
    page_size = pool.shape[2]
    outside = (pages < 0) | (pages >= num_pages) | (offsets < 0) | (offsets >= page_size)
    places = jnp.where(outside, num_pages * page_size, pages * page_size + offsets)  # past the end: compared with nothing
    dropped = outside | overwritten(places, num_pages * page_size)
    # Dropped rows get distinct pages past the end: out of bounds for the scatter, and the indices stay unique.
    pages = jnp.where(dropped, num_pages + jnp.arange(pages.shape[0], dtype=pages.dtype), pages)
    if layout == "layer_major":
        target = pool.at[:, pages, offsets] if layer is None else pool.at[layer, pages, offsets]
        latents = jnp.swapaxes(latents, 0, 1) if layer is None else latents
    else:
        target = pool.at[pages, :, offsets] if layer is None else pool.at[pages, layer, offsets]
    return target.set(latents, mode="drop", unique_indices=True)
