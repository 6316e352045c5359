from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides

if TYPE_CHECKING:
    import torch


@triton.jit
def refresh_block_tables_kernel(  # type: ignore[no-untyped-def]
    encoded_offsets,  # [pools, seqs, 2, max_blocks]
    block_tables,  # [num_seqs, max_blocks] out
    block_counts,  # [num_seqs] out
    POOL_OFFSET: tl.constexpr, SEQ_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): decode and count one row of the table."""
    row = tl.program_id(0).to(tl.int64)
    encoded_row = encoded_offsets + POOL_OFFSET + row * SEQ_STRIDE
    count = tl.zeros([], tl.int32)
    for start in range(0, MAX_BLOCKS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < MAX_BLOCKS
        encoded = tl.load(encoded_row + column * COLUMN_STRIDE, mask=inside, other=-1)
        tl.store(block_tables + row * MAX_BLOCKS + column, tl.maximum(encoded, 0) // DIVISOR, mask=inside)
        count += tl.sum((encoded >= 0).to(tl.int32))
    tl.store(block_counts + row, count)


def _launch(encoded_offsets: Any, pool_idx: int, num_seqs: int, divisor: int) -> Launch:
    max_blocks = encoded_offsets.shape[3]
    pool_stride, seq_stride, _, column_stride = strides(encoded_offsets)
    # the whole row in one tile where possible: all its loads are in flight at once
    block = power_of_2(max_blocks, at_most=16384)
    constexprs = {
        "POOL_OFFSET": pool_idx * pool_stride,
        "SEQ_STRIDE": seq_stride,
        "COLUMN_STRIDE": column_stride,
        "MAX_BLOCKS": max_blocks,
        "DIVISOR": divisor,
        "BLOCK": block,
    }
    return Launch((num_seqs,), constexprs, num_warps=max(1, min(block // 256, 16)))


def refresh_block_tables(
    encoded_offsets: torch.Tensor, *, pool_idx: int, num_seqs: int, divisor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the page manager's table of one pool, one launch; see `jdspark.ops.refresh_block_tables`. Strides are free."""
    contracts.refresh_block_tables(encoded_offsets, pool_idx, num_seqs, divisor)

    block_tables = encoded_offsets.new_empty((num_seqs, encoded_offsets.shape[3]))
    block_counts = encoded_offsets.new_empty((num_seqs,))
    launch = _launch(encoded_offsets, pool_idx, num_seqs, divisor)
    launch_in_torch(refresh_block_tables_kernel, [encoded_offsets, block_tables, block_counts], launch)
    return block_tables, block_counts


def refresh_block_tables_in_jax(
    encoded_offsets: jax.Array, *, pool_idx: int, num_seqs: int, divisor: int
) -> tuple[jax.Array, jax.Array]:
    """See `jdspark.ops.refresh_block_tables`."""
    encoded_offsets = jnp.asarray(encoded_offsets)
    outputs = [
        jax.ShapeDtypeStruct((num_seqs, encoded_offsets.shape[3]), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    ]
    if num_seqs == 0:
        return jnp.zeros(outputs[0].shape, jnp.int32), jnp.zeros(outputs[1].shape, jnp.int32)
    launch = _launch(encoded_offsets, pool_idx, num_seqs, divisor)
    block_tables, block_counts = launch_in_jax(refresh_block_tables_kernel, [encoded_offsets], outputs, launch)
    return block_tables, block_counts
