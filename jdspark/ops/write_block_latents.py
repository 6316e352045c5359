from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .block_placement import BlockPlacement
from .checks import Layout
from .latent_pool import write_latents


def write_block_latents(
    pool: jax.Array,
    block_latents: jax.Array,
    placement: BlockPlacement,
    *,
    layout: Layout = "layer_major",
    layer: int | None = None,
    backend: str = "xla",
) -> jax.Array:
    """Write the block's own latents at `(placement.pages, placement.offsets)`.

    They are transient: the next step's context store writes over them.

    Args:
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        block_latents: `[L, B, block_size, D]` in the pool's dtype, or `[B, block_size, D]` with `layer`.
        placement: from `block_placement`; a page outside the pool (-1) writes nothing.
        layer: write this layer alone, static.

    Returns:
        The pool. Writes act in (b, j) order, the last on a place wins.

    Raises:
        TypeError, ValueError: wrong dtype or shape, `layer` out of range.
    """
    contracts.write_block_latents(pool, block_latents, placement, layout, layer)
    if backend != "xla":
        return kernel("write_block_latents", backend)(pool, block_latents, placement, layout=layout, layer=layer)
    num_gen, block_size = placement.pages.shape
    if num_gen == 0:
        return pool

    block_latents = jnp.asarray(block_latents)
    rows = jnp.moveaxis(block_latents, 0, 2) if layer is None else block_latents
    rows = rows.reshape(num_gen * block_size, *rows.shape[2:])
    return write_latents(pool, rows, placement.pages.reshape(-1), placement.offsets.reshape(-1), layout, layer)
