from __future__ import annotations

import torch

from jdspark.ops import contracts

from .rms_norm import rms_norm
from .rope import at_positions, rope


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
