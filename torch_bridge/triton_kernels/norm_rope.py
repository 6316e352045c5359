"""RMSNorm and RoPE of every layer's latents in one launch.

The norm's sum of squares has one fixed order, independent of how the compiler spreads a tile over threads, so that another
kernel language can repeat it bit for bit. Element `i` of the `kv_lora_rank` numbers is lane `i % 128` of chunk `i // 128`,
missing ones are zeros up to a power of two of chunks; neighbours are added, in fp32, chunk by chunk until one chunk is left,
then lane by lane:

    s = x*x
    while chunks > 1: s[c] = s[2c] + s[2c+1]            # vectors of 128 lanes
    while lanes > 1:  s[l] = s[2l] + s[2l+1]
    out = w * (x * rsqrt(s * (1/kv_lora_rank) + eps))   # 1/kv_lora_rank rounded to fp32; rsqrt is the hardware's

No product is fused into a sum (`enable_fp_fusion=False` in both launchers), also not in the rotation
`(re*cos - im*sin, re*sin + im*cos)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2, strides
from .safety import clip

if TYPE_CHECKING:
    import torch


@triton.jit
def sum_of_neighbours(values, CHUNKS: tl.constexpr, CHUNK_STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of `values [CHUNKS * 128]` in the order above; the sum of two along an axis has only one order."""
    for step in tl.static_range(CHUNK_STEPS):
        values = tl.reshape(tl.sum(tl.reshape(values, [CHUNKS >> (step + 1), 2, 128]), axis=1), [CHUNKS * 64 >> step])
    for step in tl.static_range(7):
        values = tl.sum(tl.reshape(values, [64 >> step, 2]), axis=1)
    return tl.sum(values)  # of one


@triton.jit
def norm_rope_kernel(  # type: ignore[no-untyped-def]
    latents,  # [N, L, D]
    positions,  # [N]
    kv_a_norm,  # [L, kv_lora_rank]
    cos,  # [length, rope/2] fp32
    sin,  # [length, rope/2] fp32
    normed,  # [N, L, D] out
    TOKEN_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    WEIGHT_LAYER_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr, COS_PAIR_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr, SIN_PAIR_STRIDE: tl.constexpr,
    NUM_LAYERS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr, LENGTH: tl.constexpr,
    ONE_OVER_RANK: tl.constexpr, EPS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_STEPS: tl.constexpr, PAIR_LANES: tl.constexpr,
):  # fmt: skip
    """Program (token, layer): one latent."""
    token, layer = tl.program_id(0), tl.program_id(1)
    row = latents + token.to(tl.int64) * TOKEN_STRIDE + layer * LAYER_STRIDE
    out = normed + (token.to(tl.int64) * NUM_LAYERS + layer) * WIDTH

    i = tl.arange(0, CHUNKS * 128)
    x = tl.load(row + i * LATENT_STRIDE, mask=i < RANK, other=0.0).to(tl.float32)
    w = tl.load(kv_a_norm + layer * WEIGHT_LAYER_STRIDE + i * WEIGHT_STRIDE, mask=i < RANK, other=0.0).to(tl.float32)
    scale = tl.rsqrt(sum_of_neighbours(x * x, CHUNKS, CHUNK_STEPS) * ONE_OVER_RANK + EPS)
    tl.store(out + i, (w * (x * scale)).to(normed.dtype.element_ty), mask=i < RANK)

    if PAIRS > 0:
        pair = tl.arange(0, PAIR_LANES)
        inside = pair < PAIRS
        position = clip(tl.load(positions + token), 0, LENGTH - 1).to(tl.int64)
        c = tl.load(cos + position * COS_STRIDE + pair * COS_PAIR_STRIDE, mask=inside, other=0.0)
        s = tl.load(sin + position * SIN_STRIDE + pair * SIN_PAIR_STRIDE, mask=inside, other=0.0)
        re = tl.load(row + (RANK + 2 * pair) * LATENT_STRIDE, mask=inside, other=0.0).to(tl.float32)
        im = tl.load(row + (RANK + 2 * pair + 1) * LATENT_STRIDE, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + RANK + 2 * pair, (re * c - im * s).to(normed.dtype.element_ty), mask=inside)
        tl.store(out + RANK + 2 * pair + 1, (re * s + im * c).to(normed.dtype.element_ty), mask=inside)


def _launch(latents: Any, kv_a_norm: Any, cos: Any, sin: Any, eps: float) -> Launch:
    num_tokens, num_layers, width = latents.shape
    rank = kv_a_norm.shape[1]
    chunks = power_of_2(triton.cdiv(rank, 128))
    constexprs = {
        **dict(zip(("TOKEN_STRIDE", "LAYER_STRIDE", "LATENT_STRIDE"), strides(latents), strict=True)),
        **dict(zip(("WEIGHT_LAYER_STRIDE", "WEIGHT_STRIDE"), strides(kv_a_norm), strict=True)),
        **dict(zip(("COS_STRIDE", "COS_PAIR_STRIDE"), strides(cos), strict=True)),
        **dict(zip(("SIN_STRIDE", "SIN_PAIR_STRIDE"), strides(sin), strict=True)),
        "NUM_LAYERS": num_layers,
        "WIDTH": width,
        "RANK": rank,
        "PAIRS": (width - rank) // 2,
        "LENGTH": cos.shape[0],
        "ONE_OVER_RANK": float(np.float32(1 / rank)),
        "EPS": float(np.float32(eps)),
        "CHUNKS": chunks,
        "CHUNK_STEPS": chunks.bit_length() - 1,
        "PAIR_LANES": power_of_2((width - rank) // 2),
    }
    return Launch((num_tokens, num_layers), constexprs)


def norm_rope(
    latents: torch.Tensor,
    positions: torch.Tensor,
    kv_a_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """RMSNorm of the first `kv_lora_rank` numbers of each latent, RoPE of the rest, one launch; see `jdspark.ops.norm_rope`."""
    contracts.norm_rope(latents, positions, kv_a_norm, cos, sin)

    latents, positions, kv_a_norm, cos, sin = (pinned(x) for x in (latents, positions, kv_a_norm, cos, sin))
    normed = latents.new_empty(latents.shape)
    launch_in_torch(
        norm_rope_kernel, [latents, positions, kv_a_norm, cos, sin, normed], _launch(latents, kv_a_norm, cos, sin, eps)
    )
    return normed


def norm_rope_in_jax(
    latents: jax.Array,
    positions: jax.Array,
    kv_a_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """See `jdspark.ops.norm_rope`."""
    inputs = [jnp.asarray(operand) for operand in (latents, positions, kv_a_norm, cos, sin)]
    if latents.size == 0:
        return inputs[0]
    output = jax.ShapeDtypeStruct(latents.shape, latents.dtype)
    return launch_in_jax(norm_rope_kernel, inputs, [output], _launch(latents, kv_a_norm, cos, sin, eps))[0]
