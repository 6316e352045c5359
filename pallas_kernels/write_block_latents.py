from __future__ import annotations

import functools

import jax

from jdspark.ops import BlockPlacement

from .latent_rows import PoolShape, move_rows, overwritten
from .launch import Ref, launch, program


@functools.partial(jax.jit, static_argnames=("layout", "layer"))
def write_block_latents(
    pool: jax.Array,
    block_latents: jax.Array,
    placement: BlockPlacement,
    *,
    layout: str = "layer_major",
    layer: int | None = None,
) -> jax.Array:
    """The pool with the block's latents at (pages, offsets), in place if the pool is donated.

    `block_latents` is `[L, B, block_size, D]`, or `[B, block_size, D]` for one `layer`. One launch, one program per
    token of the block, which writes all its layers, or nothing if a later token goes to its place.
    """
    num_gen, block_size = placement.pages.shape
    if num_gen == 0 or pool.size == 0:
        return pool
    num_tokens = num_gen * block_size
    shape = PoolShape.of(pool, layout)
    layers = tuple(range(shape.num_layers)) if layer is None else (layer,)

    def write_block_latents_kernel(block_latents: Ref, pages: Ref, offsets: Ref, pool: Ref) -> None:
        b, j = program("request", num_gen), program("token", block_size)
        i = b * block_size + j
        page, offset = pages[i], offsets[i]
        writes = shape.holds(page, offset) & ~overwritten(i, num_tokens, (pages, page), (offsets, offset))
        move_rows(
            pool,
            shape,
            layers,
            lambda written: block_latents.at[b, j] if layer is not None else block_latents.at[written, b, j],
            page,
            offset,
            writes,
        )

    pool_ref = jax.new_ref(pool)
    launch(write_block_latents_kernel, out_type=(), grid={"token": block_size, "request": num_gen})(
        block_latents, placement.pages.reshape(-1), placement.offsets.reshape(-1), pool_ref
    )
    return jax.freeze(pool_ref)
