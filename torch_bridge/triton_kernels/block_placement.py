from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import BlockPlacement, contracts

from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .safety import clip, floor_remainder

if TYPE_CHECKING:
    import torch


@triton.jit
def block_placement_kernel(  # type: ignore[no-untyped-def]
    advertised,  # [B]
    block_tables,  # [rows, max_blocks]
    block_counts,  # [rows] if HAS_COUNTS, else anything
    pages,  # [B, block_size] out
    offsets,  # [B, block_size] out
    seq_lens,  # [B] out
    upper,  # [1, block_size, 1, block_size] out, bool
    FIRST_ROW: tl.constexpr, HAS_COUNTS: tl.constexpr, MAX_BLOCKS: tl.constexpr, ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (b): one request's pages and offsets; the first program also writes the triangle."""
    b = tl.program_id(0)
    row = FIRST_ROW + b
    length = tl.load(advertised + b)
    tl.store(seq_lens + b, (length + BLOCK_SIZE).to(tl.int32))

    j = tl.arange(0, LANES)
    position = length + j
    column = position // PAGE_SIZE
    owned = clip(tl.load(block_counts + row), 0, MAX_BLOCKS) if HAS_COUNTS else MAX_BLOCKS
    inside = (position >= 0) & (column < owned)
    entry = row.to(tl.int64) * ROW_STRIDE + column * COLUMN_STRIDE
    page = tl.load(block_tables + entry, mask=inside & (j < BLOCK_SIZE), other=-1)
    tl.store(pages + b * BLOCK_SIZE + j, page.to(tl.int32), mask=j < BLOCK_SIZE)
    tl.store(offsets + b * BLOCK_SIZE + j, floor_remainder(position, PAGE_SIZE).to(tl.int32), mask=j < BLOCK_SIZE)

    if b == 0:
        query, key = j[:, None], j[None, :]
        tl.store(upper + query * BLOCK_SIZE + key, key > query, mask=(query < BLOCK_SIZE) & (key < BLOCK_SIZE))


def _launch(num_gen: int, block_tables: Any, block_counts: Any, *, block_size: int, page_size: int, first_row: int) -> Launch:
    row_stride, column_stride = strides(block_tables)
    constexprs = {
        "FIRST_ROW": first_row,
        "HAS_COUNTS": block_counts is not None,
        "MAX_BLOCKS": block_tables.shape[1],
        "ROW_STRIDE": row_stride,
        "COLUMN_STRIDE": column_stride,
        "BLOCK_SIZE": block_size,
        "PAGE_SIZE": page_size,
        "LANES": power_of_2(block_size),
    }
    return Launch((num_gen,), constexprs, num_warps=1)


def block_placement(
    advertised: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    page_size: int,
    first_row: int = 0,
    block_counts: torch.Tensor | None = None,
) -> BlockPlacement:
    """Pages and offsets of the block's positions, int32, one launch; see `jdspark.ops.block_placement`."""
    import torch

    contracts.block_placement(advertised, block_tables, block_size, page_size, first_row, block_counts)

    num_gen = advertised.shape[0]
    pages = advertised.new_empty((num_gen, block_size), dtype=torch.int32)
    offsets = advertised.new_empty((num_gen, block_size), dtype=torch.int32)
    seq_lens = advertised.new_empty(num_gen, dtype=torch.int32)
    upper = advertised.new_empty((1, block_size, 1, block_size), dtype=torch.bool)
    if num_gen == 0:
        upper = upper.fill_(True).squeeze(2).triu(1).unsqueeze(2)
    launch = _launch(num_gen, block_tables, block_counts, block_size=block_size, page_size=page_size, first_row=first_row)
    counts = block_tables if block_counts is None else block_counts.contiguous()
    arrays = [advertised.contiguous(), block_tables, counts, pages, offsets, seq_lens, upper]
    launch_in_torch(block_placement_kernel, arrays, launch)
    page_tables = block_tables[first_row : first_row + num_gen].to(torch.int32)
    return BlockPlacement(pages, offsets, upper, page_tables, seq_lens)


def block_placement_in_jax(
    advertised: jax.Array,
    block_tables: jax.Array,
    *,
    block_size: int,
    page_size: int,
    first_row: int = 0,
    block_counts: jax.Array | None = None,
) -> BlockPlacement:
    """See `jdspark.ops.block_placement`."""
    num_gen, block_tables = advertised.shape[0], jnp.asarray(block_tables)
    shapes = [(num_gen, block_size), (num_gen, block_size), (num_gen,), (1, block_size, 1, block_size)]
    if num_gen == 0:
        pages, offsets, seq_lens = (jnp.zeros(shape, jnp.int32) for shape in shapes[:3])
        upper = jnp.triu(jnp.ones((block_size, block_size), bool), 1)[None, :, None]
    else:
        launch = _launch(num_gen, block_tables, block_counts, block_size=block_size, page_size=page_size, first_row=first_row)
        counts = block_tables if block_counts is None else jnp.asarray(block_counts)
        dtypes = [jnp.int32, jnp.int32, jnp.int32, jnp.bool_]
        outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        inputs = [jnp.asarray(advertised), block_tables, counts]
        pages, offsets, seq_lens, upper = launch_in_jax(block_placement_kernel, inputs, outputs, launch)
    page_tables = jax.lax.slice_in_dim(block_tables, first_row, first_row + num_gen)
    return BlockPlacement(pages, offsets, upper, page_tables, seq_lens)
