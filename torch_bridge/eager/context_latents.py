from __future__ import annotations

import torch

from jdspark.ops import contracts

from .linear import linear
from .norm_rope import norm_rope


def context_latents(
    projected: torch.Tensor,
    positions: torch.Tensor,
    kv_a_proj: torch.Tensor,
    kv_a_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """Every layer's latent of the projected context rows, `[N, L, D]`; see `jdspark.ops.context_latents`."""
    contracts.context_latents(projected, positions, kv_a_proj, kv_a_norm, cos, sin)

    num_layers, width, hidden = kv_a_proj.shape
    stacked = kv_a_proj.reshape(num_layers * width, hidden)
    latents = linear(projected, stacked).reshape(-1, num_layers, width)
    return norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps)
