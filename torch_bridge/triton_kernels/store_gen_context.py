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
    num_layers,
    overwrites,
    places,
    pool_constexprs,
    pool_rows,
    program_tokens,
    times_zero,
    token_constexprs,
)
from .launching import Launch, launch_in_jax, launch_in_torch, strides
from .safety import clip, safe_slots

if TYPE_CHECKING:
    import torch


@triton.jit
def context_column(c, j, count, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where verified token j of a request goes: `max(min(c + j, count*P - 1), 0)`, clamped to the pages it owns."""
    last = count * PAGE_SIZE - 1
    # min(c, last) first: the same number, and c + j cannot overflow
    return tl.maximum(tl.minimum(tl.minimum(c, last) + j, last), 0)


@triton.jit
def _token_places(  # type: ignore[no-untyped-def]
    token, num_tokens, ctx_len, slots, block_tables, block_counts,
    K1: tl.constexpr, DUMMY: tl.constexpr, FIRST_ROW: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The places in the pool of these tokens, -1 for one that writes nothing."""
    inside = token < num_tokens
    b, j = token // K1, token % K1
    c = tl.load(ctx_len + safe_slots(tl.load(slots + b, mask=inside, other=0), DUMMY)).to(tl.int32)
    count = clip(tl.load(block_counts + FIRST_ROW + b, mask=inside, other=0), 0, MAX_BLOCKS)
    column = context_column(c, j, count, PAGE_SIZE)
    entry = (FIRST_ROW + b).to(tl.int64) * ROW_STRIDE + (column // PAGE_SIZE) * COLUMN_STRIDE
    page = tl.load(block_tables + entry, mask=inside & (count > 0), other=-1)
    return places(page, column % PAGE_SIZE, NUM_PAGES, PAGE_SIZE)


@triton.jit
def store_gen_context_kernel(  # type: ignore[no-untyped-def]
    pool_before,  # the pool, not read: its buffer is the output's
    latents,  # [B*(K+1), L, D]
    ctx_len,  # [max_batch + 1]
    slots,  # [B]
    num_accepted,  # [B]
    block_tables,  # [rows, max_blocks]
    block_counts,  # [rows]
    pool,  # in either layout, updated in place
    NUM_TOKENS: tl.constexpr, K1: tl.constexpr, DUMMY: tl.constexpr, FIRST_ROW: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, LATENT_LAYER_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, POOL_STRIDE: tl.constexpr,
    SIGN: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr,
    TOKENS: tl.constexpr, LATER: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Program (group, layer): TOKENS tokens' latents of one layer, without those that a later token overwrites."""
    token = program_tokens(NUM_TOKENS, TOKENS, BACKWARDS)
    layer = tl.program_id(1)
    place = _token_places(
        token, NUM_TOKENS, ctx_len, slots, block_tables, block_counts,
        K1, DUMMY, FIRST_ROW, MAX_BLOCKS, ROW_STRIDE, COLUMN_STRIDE, NUM_PAGES, PAGE_SIZE,
    )  # fmt: skip
    lost = tl.zeros([TOKENS], tl.int32)
    for start in range(0, NUM_TOKENS, LATER):
        later = start + tl.arange(0, LATER)
        later_place = _token_places(
            later, NUM_TOKENS, ctx_len, slots, block_tables, block_counts,
            K1, DUMMY, FIRST_ROW, MAX_BLOCKS, ROW_STRIDE, COLUMN_STRIDE, NUM_PAGES, PAGE_SIZE,
        )  # fmt: skip
        lost = tl.maximum(lost, overwrites(place, token, later_place, later))

    n = clip(tl.load(num_accepted + token // K1, mask=token < NUM_TOKENS, other=1), 1, K1)
    d = tl.arange(0, BLOCK_WIDTH)
    writes = ((place >= 0) & (lost == 0))[:, None] & (d < WIDTH)[None, :]
    source = token.to(tl.int64) * TOKEN_STRIDE + layer.to(tl.int64) * LATENT_LAYER_STRIDE
    bits = tl.load(as_bits(latents) + source[:, None] + d[None, :] * LATENT_STRIDE, mask=writes)
    bits = tl.where((token % K1 < n)[:, None], bits, times_zero(bits, SIGN, EXPONENT, NAN))
    target = pool_rows(pool, place, layer, PAGE_SIZE, PAGE_STRIDE, OFFSET_STRIDE, LAYER_STRIDE)
    tl.store(target[:, None] + d[None, :] * POOL_STRIDE, bits, mask=writes)


def _launch(pool: Any, latents: Any, ctx_len: Any, slots: Any, block_tables: Any, layout: Layout, first_row: int) -> Launch:
    num_tokens, num_gen = latents.shape[0], slots.shape[0]
    row_stride, column_stride = strides(block_tables)
    token_stride, latent_layer_stride, latent_stride = strides(latents)
    tokens = token_constexprs(num_tokens)
    constexprs = {
        "K1": num_tokens // num_gen,
        "DUMMY": ctx_len.shape[0] - 1,
        "FIRST_ROW": first_row,
        "MAX_BLOCKS": block_tables.shape[1],
        "ROW_STRIDE": row_stride,
        "COLUMN_STRIDE": column_stride,
        "TOKEN_STRIDE": token_stride,
        "LATENT_LAYER_STRIDE": latent_layer_stride,
        "LATENT_STRIDE": latent_stride,
        **pool_constexprs(pool, layout),
        **float_constexprs(pool),
        **tokens,
    }
    return Launch((triton.cdiv(num_tokens, tokens["TOKENS"]), num_layers(pool, layout)), constexprs)


def store_gen_context(
    pool: torch.Tensor,
    latents: torch.Tensor,
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    num_accepted: torch.Tensor,
    block_tables: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    layout: Layout = "layer_major",
    first_row: int = 0,
) -> torch.Tensor:
    """Store the verified tokens' latents of all layers in place, one launch; see `jdspark.ops.store_gen_context`."""
    contracts.store_gen_context(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout, first_row)
    if slots.shape[0] == 0:
        return pool

    launch = _launch(pool, latents, ctx_len, slots, block_tables, layout, first_row)
    rows = [ctx_len.contiguous(), slots.contiguous(), num_accepted.contiguous(), block_tables, block_counts.contiguous()]
    launch_in_torch(store_gen_context_kernel, [pool, latents, *rows, pool], launch)
    return pool


def store_gen_context_in_jax(
    pool: jax.Array,
    latents: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    num_accepted: jax.Array,
    block_tables: jax.Array,
    block_counts: jax.Array,
    *,
    layout: Layout = "layer_major",
    first_row: int = 0,
) -> jax.Array:
    """See `jdspark.ops.store_gen_context`; a donated pool is updated in place."""
    pool = jnp.asarray(pool)
    if slots.shape[0] == 0:
        return pool
    inputs = [pool, *map(jnp.asarray, (latents, ctx_len, slots, num_accepted, block_tables, block_counts))]
    launch = _launch(pool, latents, ctx_len, slots, block_tables, layout, first_row)
    output = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return launch_in_jax(store_gen_context_kernel, inputs, [output], launch, in_place={0: 0})[0]
