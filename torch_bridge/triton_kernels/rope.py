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
def rope_kernel(  # type: ignore[no-untyped-def]
    x,  # [tokens, HEADS, 2 * PAIRS]
    cos,  # [tokens, PAIRS] fp32
    sin,  # [tokens, PAIRS] fp32
    rotated,  # [tokens, HEADS, 2 * PAIRS] out
    HEADS: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program: one token's heads."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, LANES)
    inside = pair < HEADS * PAIRS
    at = token * HEADS * 2 * PAIRS + 2 * pair
    c = tl.load(cos + token * PAIRS + pair % PAIRS, mask=inside, other=0.0)
    s = tl.load(sin + token * PAIRS + pair % PAIRS, mask=inside, other=0.0)
    re = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    im = tl.load(x + at + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(rotated + at, (re * c - im * s).to(rotated.dtype.element_ty), mask=inside)
    tl.store(rotated + at + 1, (re * s + im * c).to(rotated.dtype.element_ty), mask=inside)


def _launch(x: Any) -> Launch:
    heads, width = x.shape[-2:]
    constexprs = {"HEADS": heads, "PAIRS": width // 2, "LANES": power_of_2(heads * width // 2)}
    return Launch((math.prod(x.shape[:-2]) if x.shape[-1] else 0,), constexprs)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent pairs of the last axis, one launch; see `jdspark.ops.rope`."""
    contracts.rope(x, cos, sin)

    x = pinned(x)
    rotated = x.new_empty(x.shape)
    launch_in_torch(rope_kernel, [x, pinned(cos), pinned(sin), rotated], _launch(x))
    return rotated


def rope_in_jax(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """See `jdspark.ops.rope`."""
    x = jnp.asarray(x)
    if x.size == 0:
        return x
    output = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch_in_jax(rope_kernel, [x, jnp.asarray(cos), jnp.asarray(sin)], [output], _launch(x))[0]
