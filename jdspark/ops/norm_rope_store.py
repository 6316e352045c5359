from __future__ import annotations

import jax

from . import contracts
from .backends import kernel
from .checks import Layout
from .norm_rope import norm_rope
from .store_prepared import store_prepared


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
    layout: Layout = "layer_major",
    return_latents: bool = False,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array | None]:
    """`norm_rope`, then `store_prepared` of what it gives: on each backend with the bits of its own two ops.

    Args:
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        latents: `[B*(K+1), L, D]` in the pool's dtype, outputs of the layers' `kv_a_proj`.
        positions: `[B*(K+1)]` int32, clipped to the rope table.
        kv_a_norm, cos, sin, eps: of `norm_rope`.
        num_accepted, store_pages, store_offsets: of `store_prepared`.
        return_latents: whether to return the normed and rotated latents as well, static.

    Returns:
        The pool, and `[B*(K+1), L, D]` with `return_latents`, else None.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.norm_rope(latents, positions, kv_a_norm, cos, sin)
    contracts.store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout)
    if backend != "xla":
        return kernel("norm_rope_store", backend)(
            pool, latents, positions, kv_a_norm, cos, sin, num_accepted, store_pages, store_offsets,
            eps=eps, layout=layout, return_latents=return_latents,
        )  # fmt: skip

    latents = norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps)
    pool = store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
    return pool, latents if return_latents else None
