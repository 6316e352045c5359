from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.checks import Layout

from .latent_pool import (
    as_bits,
    float_constexprs,
    listed_places,
    num_layers,
    overwrites,
    pool_constexprs,
    pool_rows,
    program_tokens,
    times_zero,
    token_constexprs,
)
from .launching import Launch, launch_in_jax, launch_in_torch, strides
from .safety import clip

if TYPE_CHECKING:
    import torch


@triton.jit
def store_prepared_kernel(  # type: ignore[no-untyped-def]
    pool_before,  # the pool, not read: its buffer is the output's
    latents,  # [B*(K+1), L, D]
    num_accepted,  # [B]
    pages,  # [B, K+1]
    offsets,  # [B, K+1]
    pool,  # in either layout, updated in place
    NUM_TOKENS: tl.constexpr, K1: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, LATENT_LAYER_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, POOL_STRIDE: tl.constexpr,
    SIGN: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr,
    TOKENS: tl.constexpr, LATER: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Program (group, layer): TOKENS latents, rejected ones times zero, without those that a later token overwrites."""
    layer = tl.program_id(1)
    token = program_tokens(NUM_TOKENS, TOKENS, BACKWARDS)
    place = listed_places(token, NUM_TOKENS, pages, offsets, NUM_PAGES, PAGE_SIZE)
    lost = tl.zeros([TOKENS], tl.int32)
    for start in range(0, NUM_TOKENS, LATER):
        later = start + tl.arange(0, LATER)
        later_place = listed_places(later, NUM_TOKENS, pages, offsets, NUM_PAGES, PAGE_SIZE)
        lost = tl.maximum(lost, overwrites(place, token, later_place, later))

    n = clip(tl.load(num_accepted + token // K1, mask=token < NUM_TOKENS, other=1), 1, K1)
    d = tl.arange(0, BLOCK_WIDTH)
    writes = ((place >= 0) & (lost == 0))[:, None] & (d < WIDTH)[None, :]
    source = token.to(tl.int64) * TOKEN_STRIDE + layer.to(tl.int64) * LATENT_LAYER_STRIDE
    bits = tl.load(as_bits(latents) + source[:, None] + d[None, :] * LATENT_STRIDE, mask=writes)
    bits = tl.where((token % K1 < n)[:, None], bits, times_zero(bits, SIGN, EXPONENT, NAN))
    target = pool_rows(pool, place, layer, PAGE_SIZE, PAGE_STRIDE, OFFSET_STRIDE, LAYER_STRIDE)
    tl.store(target[:, None] + d[None, :] * POOL_STRIDE, bits, mask=writes)


def _launch(pool: Any, latents: Any, pages: Any, layout: Layout) -> Launch:
    num_tokens = latents.shape[0]
    tokens = token_constexprs(num_tokens)
    token_stride, latent_layer_stride, latent_stride = strides(latents)
    constexprs = {
        "K1": pages.shape[1],
        "TOKEN_STRIDE": token_stride,
        "LATENT_LAYER_STRIDE": latent_layer_stride,
        "LATENT_STRIDE": latent_stride,
        **pool_constexprs(pool, layout),
        **float_constexprs(pool),
        **tokens,
    }
    return Launch((triton.cdiv(num_tokens, tokens["TOKENS"]), num_layers(pool, layout)), constexprs)


def store_prepared(
    pool: torch.Tensor,
    latents: torch.Tensor,
    num_accepted: torch.Tensor,
    store_pages: torch.Tensor,
    store_offsets: torch.Tensor,
    *,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Store the verified tokens' latents in place, where `prepare_step` said, one launch; see `jdspark.ops.store_prepared`."""
    contracts.store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout)

    arrays = [pool, latents, num_accepted.contiguous(), store_pages.contiguous(), store_offsets.contiguous(), pool]
    launch_in_torch(store_prepared_kernel, arrays, _launch(pool, latents, store_pages, layout))
    return pool


def store_prepared_in_jax(
    pool: jax.Array,
    latents: jax.Array,
    num_accepted: jax.Array,
    store_pages: jax.Array,
    store_offsets: jax.Array,
    *,
    layout: Layout = "layer_major",
) -> jax.Array:
    """See `jdspark.ops.store_prepared`; a donated pool is updated in place."""
    inputs = [jnp.asarray(operand) for operand in (pool, latents, num_accepted, store_pages, store_offsets)]
    if store_pages.size == 0:
        return inputs[0]
    output = jax.ShapeDtypeStruct(pool.shape, inputs[0].dtype)
    launch = _launch(pool, latents, store_pages, layout)
    return launch_in_jax(store_prepared_kernel, inputs, [output], launch, in_place={0: 0})[0]
