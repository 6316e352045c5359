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
    latents: torch.Tensor,
    positions: torch.Tensor,
    kv_a_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """RMSNorm of the first `kv_lora_rank` numbers of each latent, RoPE of the rest; see `jdspark.ops.norm_rope`."""
    contracts.norm_rope(latents, positions, kv_a_norm, cos, sin)
    rank, positions = kv_a_norm.shape[1], positions.unsqueeze(1)
    normed = rms_norm(latents[..., :rank], kv_a_norm, eps)
    rotated = rope(latents[..., rank:], at_positions(cos, positions), at_positions(sin, positions))
    return torch.cat([normed, rotated], dim=-1)
