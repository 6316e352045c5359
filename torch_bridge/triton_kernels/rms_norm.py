from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2

if TYPE_CHECKING:
    import torch


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, WIDTH]
    weight,  # [WEIGHTS, WIDTH]
    normed,  # [rows, WIDTH] out
    WIDTH: tl.constexpr, WEIGHTS: tl.constexpr, ONE_OVER_WIDTH: tl.constexpr, EPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program: one row."""
    row = tl.program_id(0)
    i = tl.arange(0, LANES)
    values = tl.load(x + row.to(tl.int64) * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    w = tl.load(weight + row % WEIGHTS * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) * ONE_OVER_WIDTH + EPS)
    tl.store(normed + row.to(tl.int64) * WIDTH + i, (w * (values * scale)).to(normed.dtype.element_ty), mask=i < WIDTH)


def _launch(x: Any, weight: Any, eps: float) -> Launch:
    width = x.shape[-1]
    constexprs = {
        "WIDTH": width,
        "WEIGHTS": math.prod(weight.shape[:-1]),
        "ONE_OVER_WIDTH": float(np.float32(1 / max(width, 1))),
        "EPS": float(np.float32(eps)),
        "LANES": power_of_2(width),
    }
    return Launch((math.prod(x.shape[:-1]),), constexprs, num_warps=8 if width > 2048 else 4)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, one launch; see `jdspark.ops.rms_norm`."""
    contracts.rms_norm(x, weight)

    x = pinned(x)
    normed = x.new_empty(x.shape)
    launch_in_torch(rms_norm_kernel, [x, pinned(weight), normed], _launch(x, weight, eps))
    return normed


def rms_norm_in_jax(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """See `jdspark.ops.rms_norm`."""
    x = jnp.asarray(x)
    if x.size == 0:
        return x
    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_in_jax(rms_norm_kernel, [x, jnp.asarray(weight)], [output], _launch(x, weight, eps))[0]
