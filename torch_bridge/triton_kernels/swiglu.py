from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2

if TYPE_CHECKING:
    import torch


@triton.jit
def swiglu_kernel(gate, up, out, SIZE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program: LANES elements."""
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    g = tl.load(gate + i, mask=i < SIZE, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < SIZE, other=0.0).to(tl.float32)
    silu = tl.math.div_rn(g, 1.0 + tl.exp(-g))
    tl.store(out + i, (silu * u).to(out.dtype.element_ty), mask=i < SIZE)


def _launch(gate: Any) -> Launch:
    size = math.prod(gate.shape)
    lanes = power_of_2(size, at_most=512)
    return Launch((triton.cdiv(size, lanes),), {"SIZE": size, "LANES": lanes})


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, one launch; see `jdspark.ops.swiglu`."""
    contracts.swiglu(gate, up)

    gate = pinned(gate)
    out = gate.new_empty(gate.shape)
    launch_in_torch(swiglu_kernel, [gate, pinned(up), out], _launch(gate))
    return out


def swiglu_in_jax(gate: jax.Array, up: jax.Array) -> jax.Array:
    """See `jdspark.ops.swiglu`."""
    gate = jnp.asarray(gate)
    if gate.size == 0:
        return gate
    output = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    return launch_in_jax(swiglu_kernel, [gate, jnp.asarray(up)], [output], _launch(gate))[0]
