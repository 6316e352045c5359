from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .latent_rows import PoolShape, move_rows, overwritten
from .launch import Ref, launch, program


@functools.partial(jax.jit, static_argnames=("layout",))
def store_prepared(
    pool: jax.Array,
    latents: jax.Array,
    num_accepted: jax.Array,
    store_pages: jax.Array,
    store_offsets: jax.Array,
    *,
    layout: str = "layer_major",
) -> jax.Array:
    """The pool with `latents [B*(K+1), L, D]` at the destinations of a PreparedStep, in place if the pool is donated.

    The bits of `store_gen_context`. One launch, one program per token, which writes all layers or leaves its place to a
    later token, of whatever request.
    """
    num_gen, width = store_pages.shape
    if num_gen == 0 or pool.size == 0:
        return pool
    shape = PoolShape.of(pool, layout)

    def store_prepared_kernel(latents: Ref, num_accepted: Ref, pages: Ref, offsets: Ref, pool: Ref) -> None:
        b, j = program("request", num_gen), program("token", width)
        i = b * width + j
        page, offset = pages[i], offsets[i]
        writes = shape.holds(page, offset) & ~overwritten(i, num_gen * width, (pages, page), (offsets, offset))
        move_rows(
            pool,
            shape,
            tuple(range(shape.num_layers)),
            lambda layer: latents.at[i, layer],
            page,
            offset,
            writes,
            accepted=j < jnp.clip(num_accepted[b], 1, width),
        )

    pool_ref = jax.new_ref(pool)
    launch(store_prepared_kernel, out_type=(), grid={"token": width, "request": num_gen})(
        latents, num_accepted, store_pages.reshape(-1), store_offsets.reshape(-1), pool_ref
    )
    return jax.freeze(pool_ref)
