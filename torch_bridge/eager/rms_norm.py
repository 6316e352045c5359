from __future__ import annotations

import torch

from jdspark.ops import contracts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in fp32, cast to x's dtype; see `jdspark.ops.rms_norm`."""
    contracts.rms_norm(x, weight)
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (weight.float() * y).to(x.dtype)
