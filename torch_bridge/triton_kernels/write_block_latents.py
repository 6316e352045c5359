from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import BlockPlacement, contracts
from jdspark.ops.checks import Layout

from .latent_pool import (
    as_bits,
    listed_places,
    num_layers,
    overwrites,
    pool_constexprs,
    pool_rows,
    program_tokens,
    token_constexprs,
)
from .launching import Launch, launch_in_jax, launch_in_torch, strides

if TYPE_CHECKING:
    import torch


@triton.jit
def write_block_latents_kernel(  # type: ignore[no-untyped-def]
    pool_before,  # the pool, not read: its buffer is the output's
    block_latents,  # [L, B, block_size, D], or [B, block_size, D] of FIRST_LAYER
    pages,  # [B, block_size]
    offsets,  # [B, block_size]
    pool,  # in either layout, updated in place
    NUM_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST_LAYER: tl.constexpr, LATENT_LAYER_STRIDE: tl.constexpr,
    REQUEST_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, POOL_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr, LATER: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Program (group, layer): TOKENS latents of the block, without those that a later token overwrites."""
    layer = tl.program_id(1)
    token = program_tokens(NUM_TOKENS, TOKENS, BACKWARDS)
    place = listed_places(token, NUM_TOKENS, pages, offsets, NUM_PAGES, PAGE_SIZE)
    lost = tl.zeros([TOKENS], tl.int32)
    for start in range(0, NUM_TOKENS, LATER):
        later = start + tl.arange(0, LATER)
        later_place = listed_places(later, NUM_TOKENS, pages, offsets, NUM_PAGES, PAGE_SIZE)
        lost = tl.maximum(lost, overwrites(place, token, later_place, later))

    d = tl.arange(0, BLOCK_WIDTH)
    writes = ((place >= 0) & (lost == 0))[:, None] & (d < WIDTH)[None, :]
    source = (token // BLOCK_SIZE).to(tl.int64) * REQUEST_STRIDE + (token % BLOCK_SIZE) * TOKEN_STRIDE
    source += layer.to(tl.int64) * LATENT_LAYER_STRIDE
    bits = tl.load(as_bits(block_latents) + source[:, None] + d[None, :] * LATENT_STRIDE, mask=writes)
    target = pool_rows(pool, place, FIRST_LAYER + layer, PAGE_SIZE, PAGE_STRIDE, OFFSET_STRIDE, LAYER_STRIDE)
    tl.store(target[:, None] + d[None, :] * POOL_STRIDE, bits, mask=writes)


def _launch(pool: Any, block_latents: Any, num_gen: int, block_size: int, layout: Layout, layer: int | None) -> Launch:
    num_tokens = num_gen * block_size
    tokens = token_constexprs(num_tokens)
    layer_stride, *token_strides = (0, *strides(block_latents))[-4:]
    constexprs = {
        "BLOCK_SIZE": block_size,
        "FIRST_LAYER": layer or 0,
        "LATENT_LAYER_STRIDE": layer_stride,
        "REQUEST_STRIDE": token_strides[0],
        "TOKEN_STRIDE": token_strides[1],
        "LATENT_STRIDE": token_strides[2],
        **pool_constexprs(pool, layout),
        **tokens,
    }
    return Launch((triton.cdiv(num_tokens, tokens["TOKENS"]), num_layers(pool, layout) if layer is None else 1), constexprs)


def write_block_latents(
    pool: torch.Tensor,
    block_latents: torch.Tensor,
    placement: BlockPlacement,
    *,
    layout: Layout = "layer_major",
    layer: int | None = None,
) -> torch.Tensor:
    """Write the block's own latents in place, all layers in one launch; see `jdspark.ops.write_block_latents`."""
    contracts.write_block_latents(pool, block_latents, placement, layout, layer)

    num_gen, block_size = placement.pages.shape
    launch = _launch(pool, block_latents, num_gen, block_size, layout, layer)
    arrays = [pool, block_latents, placement.pages.contiguous(), placement.offsets.contiguous(), pool]
    launch_in_torch(write_block_latents_kernel, arrays, launch)
    return pool


def write_block_latents_in_jax(
    pool: jax.Array,
    block_latents: jax.Array,
    placement: BlockPlacement,
    *,
    layout: Layout = "layer_major",
    layer: int | None = None,
) -> jax.Array:
    """See `jdspark.ops.write_block_latents`; a donated pool is updated in place."""
    pool = jnp.asarray(pool)
    if placement.pages.size == 0:
        return pool
    inputs = [pool, *map(jnp.asarray, (block_latents, placement.pages, placement.offsets))]
    num_gen, block_size = placement.pages.shape
    launch = _launch(pool, block_latents, num_gen, block_size, layout, layer)
    output = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return launch_in_jax(write_block_latents_kernel, inputs, [output], launch, in_place={0: 0})[0]
