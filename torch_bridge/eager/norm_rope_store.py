from __future__ import annotations

import torch

from jdspark.ops.checks import Layout

from .norm_rope import norm_rope
from .store_prepared import store_prepared


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
    """`norm_rope`, then `store_prepared` in place; see `jdspark.ops.norm_rope_store`."""
    latents = norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps)
    pool = store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
    return pool, latents if return_latents else None
