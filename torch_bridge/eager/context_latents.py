from __future__ import annotations

import torch

from jdspark.ops import contracts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in fp32, cast to x's dtype."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (weight.float() * y).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of the last axis in fp32, cast to x's dtype."""
    re, im = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([re * cos - im * sin, re * sin + im * cos], dim=-1).flatten(-2).to(x.dtype)


def at_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of a rope table; positions outside it are clipped."""
    return table[positions.long().clamp(0, table.shape[0] - 1)]


def norm_rope(
    latents: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMSNorm of the first `kv_lora_rank` numbers of each latent, RoPE of the rest; see `jdspark.ops.norm_rope`."""
    rank = weight.shape[-1]
    normed = rms_norm(latents[..., :rank], weight, eps)
    rotated = rope(latents[..., rank:], at_positions(cos, positions), at_positions(sin, positions))
    return torch.cat([normed, rotated], dim=-1)


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
    latents = (projected.to(kv_a_proj.dtype) @ stacked.T).reshape(-1, num_layers, width)
    return norm_rope(latents, positions.unsqueeze(1), kv_a_norm, cos, sin, eps=eps)
