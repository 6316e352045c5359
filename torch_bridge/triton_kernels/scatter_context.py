from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.checks import Layout

from .latent_pool import as_bits, num_layers, overwrites, places, pool_constexprs, pool_rows, program_tokens, token_constexprs
from .launching import Launch, launch_in_jax, launch_in_torch, strides

if TYPE_CHECKING:
    import torch


@triton.jit
def _token_places(  # type: ignore[no-untyped-def]
    token, num_tokens, rows, positions, block_tables, NUM_ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The places in the pool of these tokens, -1 for one that writes nothing."""
    row = tl.load(rows + token, mask=token < num_tokens, other=-1)
    position = tl.load(positions + token, mask=token < num_tokens, other=-1)
    column = position // PAGE_SIZE
    inside = (row >= 0) & (row < NUM_ROWS) & (position >= 0) & (column < MAX_BLOCKS)
    page = tl.load(block_tables + row.to(tl.int64) * ROW_STRIDE + column * COLUMN_STRIDE, mask=inside, other=-1)
    return places(page, position % PAGE_SIZE, NUM_PAGES, PAGE_SIZE)


@triton.jit
def scatter_context_kernel(  # type: ignore[no-untyped-def]
    pool_before,  # the pool, not read: its buffer is the output's
    latents,  # [N, L, D]
    rows,  # [N]
    positions,  # [N]
    block_tables,  # [rows, max_blocks]
    pool,  # in either layout, updated in place
    NUM_TOKENS: tl.constexpr, NUM_ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, LATENT_LAYER_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, POOL_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr, LATER: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Program (group, layer): TOKENS tokens' latents of one layer, without those that a later token overwrites."""
    token = program_tokens(NUM_TOKENS, TOKENS, BACKWARDS)
    layer = tl.program_id(1)
    place = _token_places(
        token, NUM_TOKENS, rows, positions, block_tables, NUM_ROWS, MAX_BLOCKS, ROW_STRIDE, COLUMN_STRIDE, NUM_PAGES, PAGE_SIZE
    )
    lost = tl.zeros([TOKENS], tl.int32)
    for start in range(0, NUM_TOKENS, LATER):
        later = start + tl.arange(0, LATER)
        later_place = _token_places(
            later, NUM_TOKENS, rows, positions, block_tables,
            NUM_ROWS, MAX_BLOCKS, ROW_STRIDE, COLUMN_STRIDE, NUM_PAGES, PAGE_SIZE,
        )  # fmt: skip
        lost = tl.maximum(lost, overwrites(place, token, later_place, later))

    d = tl.arange(0, BLOCK_WIDTH)
    writes = ((place >= 0) & (lost == 0))[:, None] & (d < WIDTH)[None, :]
    source = token.to(tl.int64) * TOKEN_STRIDE + layer.to(tl.int64) * LATENT_LAYER_STRIDE
    bits = tl.load(as_bits(latents) + source[:, None] + d[None, :] * LATENT_STRIDE, mask=writes)
    target = pool_rows(pool, place, layer, PAGE_SIZE, PAGE_STRIDE, OFFSET_STRIDE, LAYER_STRIDE)
    tl.store(target[:, None] + d[None, :] * POOL_STRIDE, bits, mask=writes)


def _launch(pool: Any, latents: Any, block_tables: Any, layout: Layout) -> Launch:
    num_tokens = latents.shape[0]
    row_stride, column_stride = strides(block_tables)
    token_stride, latent_layer_stride, latent_stride = strides(latents)
    tokens = token_constexprs(num_tokens)
    constexprs = {
        "NUM_ROWS": block_tables.shape[0],
        "MAX_BLOCKS": block_tables.shape[1],
        "ROW_STRIDE": row_stride,
        "COLUMN_STRIDE": column_stride,
        "TOKEN_STRIDE": token_stride,
        "LATENT_LAYER_STRIDE": latent_layer_stride,
        "LATENT_STRIDE": latent_stride,
        **pool_constexprs(pool, layout),
        **tokens,
    }
    return Launch((triton.cdiv(num_tokens, tokens["TOKENS"]), num_layers(pool, layout)), constexprs)


def scatter_context(
    pool: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Write each token's latents of all layers in place, one launch; see `jdspark.ops.scatter_context`."""
    contracts.scatter_context(pool, latents, rows, positions, block_tables, layout)

    launch = _launch(pool, latents, block_tables, layout)
    arrays = [pool, latents, rows.contiguous(), positions.contiguous(), block_tables, pool]
    launch_in_torch(scatter_context_kernel, arrays, launch)
    return pool


def scatter_context_in_jax(
    pool: jax.Array,
    latents: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    *,
    layout: Layout = "layer_major",
) -> jax.Array:
    """See `jdspark.ops.scatter_context`; a donated pool is updated in place."""
    pool = jnp.asarray(pool)
    if rows.shape[0] == 0:
        return pool
    inputs = [pool, *map(jnp.asarray, (latents, rows, positions, block_tables))]
    launch = _launch(pool, latents, block_tables, layout)
    output = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return launch_in_jax(scatter_context_kernel, inputs, [output], launch, in_place={0: 0})[0]
