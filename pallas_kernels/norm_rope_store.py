from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .latent_rows import PoolShape, keep_or_zero, overwritten
from .launch import Ref, launch, program, struct
from .norm_rope import goes_in_pairs, negative_zero, norm_rope, norm_rope_pairs, split_pairs
from .store_prepared import store_prepared


@functools.partial(jax.jit, static_argnames=("eps", "layout", "return_latents"))
def norm_rope_store(
    pool: jax.Array,
    latents: jax.Array,
    positions: jax.Array,
    kv_a_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    num_accepted: jax.Array,
    store_pages: jax.Array,
    store_offsets: jax.Array,
    *,
    eps: float,
    layout: str = "layer_major",
    return_latents: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`norm_rope`, then `store_prepared`, with their bits and in place if the pool is donated.

    One launch, one program per latent, which stores it or leaves its place to a later token. Latents that do not go in
    pairs (see `norm_rope`) take the two launches.
    """
    num_gen, width = store_pages.shape
    num_tokens, num_layers, latent_dim = latents.shape
    rank, table_length = kv_a_norm.shape[1], cos.shape[0]
    if pool.size == 0 or num_gen == 0 or not goes_in_pairs(latent_dim, rank):
        latents = norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps)
        pool = store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
        return pool, latents if return_latents else None
    shape = PoolShape.of(pool, layout)
    tables = () if latent_dim == rank else (cos, sin)

    def norm_rope_store_kernel(
        latents: Ref, positions: Ref, weights: Ref, num_accepted: Ref, pages: Ref, offsets: Ref, *refs: Ref
    ) -> None:
        *tables, negative_zero, pool = refs[: len(refs) - return_latents]
        b, j, layer = program("request", num_gen), program("token", width), lax.axis_index("layer")
        i = b * width + j
        page, offset = pages[i], offsets[i]
        position = jnp.clip(positions[i], 0, table_length - 1)
        cos_sin = (tables[0].at[position], tables[1].at[position]) if tables else None
        parts = norm_rope_pairs(latents.at[i, layer], weights.at[layer], cos_sin, rank, eps, negative_zero[0])
        writes = shape.holds(page, offset) & ~overwritten(i, num_tokens, (pages, page), (offsets, offset))
        accepted = j < jnp.clip(num_accepted[b], 1, width)
        kept = [keep_or_zero(part.values, accepted, part.splat) for part in parts]

        @pl.when(writes)
        def _store() -> None:
            for part, values in zip(parts, kept):
                part.store(shape.row(pool, layer, page, offset), values)

        if return_latents:
            for part in parts:
                part.store(refs[-1].at[i, layer], part.values)

    pool_ref = jax.new_ref(split_pairs(pool))
    stored = launch(
        norm_rope_store_kernel,
        out_type=struct(split_pairs(latents).shape, latents.dtype) if return_latents else (),
        grid={"layer": num_layers, "token": width, "request": num_gen},
    )(
        split_pairs(latents), positions, split_pairs(kv_a_norm), num_accepted, store_pages.reshape(-1),
        store_offsets.reshape(-1), *tables, negative_zero(), pool_ref,
    )  # fmt: skip
    pool = jax.freeze(pool_ref).reshape(pool.shape)
    return pool, stored.reshape(latents.shape) if return_latents else None
