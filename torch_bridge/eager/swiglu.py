from __future__ import annotations

import torch

from jdspark.ops import contracts


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` in fp32, cast to the gate's dtype; see `jdspark.ops.swiglu`."""
    contracts.swiglu(gate, up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
