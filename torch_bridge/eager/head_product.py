from __future__ import annotations

import torch

from jdspark.ops import contracts


def head_product(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """Each head's own product, `[B, T, heads, N]`; see `jdspark.ops.head_product`."""
    contracts.head_product(x, weight, transposed)
    return torch.einsum("bthk,hnk->bthn" if transposed else "bthk,hkn->bthn", x, weight)
