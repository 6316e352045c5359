"""Telling the cache that nobody will read some memory again."""

from __future__ import annotations

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .launch import WARPGROUP, Ref, ceil_div

LINE_BYTES = 128
"""Of the cache: what is left undefined begins and ends with one."""


def discard(rows: Ref, count: jax.Array, warpgroups: int) -> None:
    """Leave the first `count` rows of `[n, columns]` in global memory undefined.

    What a kernel has written stays in the cache until something else needs the place, and only then goes to memory: to no end
    if its only reader is done with it, and while another kernel wants the bandwidth. All threads of a program of so many
    warpgroups call it, when none of them reads the rows any more. Without a GPU it does nothing.

    Raises ValueError for columns that are not whole lines; rows must begin with one.
    """
    item_bytes = rows.dtype.itemsize
    row_bytes, threads = rows.shape[1] * item_bytes, warpgroups * WARPGROUP
    lines = row_bytes // LINE_BYTES
    if row_bytes % LINE_BYTES:
        raise ValueError(f"discard: a row is {row_bytes} bytes, expected whole lines of {LINE_BYTES}")
    if jax.default_backend() != "gpu":
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def discard_lines(context: mgpu.LaunchContext, rows: ir.Value, count: mgpu.FragmentedArray) -> None:
        del context
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        rows_type = ir.MemRefType(rows.type)
        (row_stride, _), _ = rows_type.get_strides_and_offset()
        start = llvm.ptrtoint(i64, utils.memref_ptr(rows))
        for first in range(0, ceil_div(rows_type.shape[0] * lines, threads) * threads, threads):
            line = arith.addi(utils.thread_idx(), utils.c(first, i32))
            row, part = arith.divui(line, utils.c(lines, i32)), arith.remui(line, utils.c(lines, i32))
            there = arith.cmpi(arith.CmpIPredicate.slt, row, count.registers.item())
            offset = arith.muli(arith.extui(i64, row), utils.c(row_stride * item_bytes, i64))
            offset = arith.addi(offset, arith.muli(arith.extui(i64, part), utils.c(LINE_BYTES, i64)))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [there, arith.addi(start, offset)],
                f"@$0 discard.global.L2 [$1], {LINE_BYTES};", "b,l", has_side_effects=True,
            )  # fmt: skip

    discard_lines(rows, count)
