from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jdspark.ops.checks import Layout

from .norm_rope import norm_rope, norm_rope_in_jax
from .store_prepared import store_prepared, store_prepared_in_jax

if TYPE_CHECKING:
    import torch


def norm_rope_store(
    pool: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    kv_a_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_accepted: torch.Tensor,
    store_pages: torch.Tensor,
    store_offsets: torch.Tensor,
    *,
    eps: float,
    layout: Layout = "layer_major",
    return_latents: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`norm_rope`, then `store_prepared` in place, two launches; see `jdspark.ops.norm_rope_store`."""
    latents = norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps)
    pool = store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
    return pool, latents if return_latents else None


def norm_rope_store_in_jax(
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
) -> tuple[jax.Array, jax.Array | None]:
    """See `jdspark.ops.norm_rope_store`; a donated pool is updated in place."""
    latents = norm_rope_in_jax(latents, positions, kv_a_norm, cos, sin, eps=eps)
    pool = store_prepared_in_jax(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
    return pool, latents if return_latents else None
