from __future__ import annotations

import torch

from jdspark.ops import contracts


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of the last axis in fp32, cast to x's dtype; see `jdspark.ops.rope`."""
    contracts.rope(x, cos, sin)
    re, im = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([re * cos - im * sin, re * sin + im * cos], dim=-1).flatten(-2).to(x.dtype)


def at_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of a rope table; positions outside it are clipped."""
    return table[positions.long().clamp(0, table.shape[0] - 1)]
