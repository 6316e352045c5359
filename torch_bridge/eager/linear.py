from __future__ import annotations

import torch

from jdspark.ops import contracts


def linear(x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T` in the weight's dtype, `residual +` that; see `jdspark.ops.linear`."""
    contracts.linear(x, weight, residual)
    product = x.to(weight.dtype) @ weight.T
    return product if residual is None else residual + product
