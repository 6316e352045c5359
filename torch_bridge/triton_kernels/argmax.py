"""Torch's argmax inside a kernel: the lowest index among equals, the first NaN above everything.

A program keeps the best value of each of its lanes while it walks along a row, then folds the lanes through one integer key:
the value's order in the upper half, the index, counted down, in the lower. The largest key is the answer, whatever the order
in which keys are compared.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def keep_better(best, best_index, values, index):  # type: ignore[no-untyped-def]
    """Lane by lane the better of what was kept and `values`, whose indices are higher."""
    better = ~(values <= best) & (best == best)  # above it, or the first NaN
    return tl.where(better, values, best), tl.where(better, index, best_index)


@triton.jit
def value_order(values):  # type: ignore[no-untyped-def]
    """int32 with the order of the fp32 values: NaNs are all equal and largest, -0.0 equals 0.0."""
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(values == 0.0, 0, order)
    return tl.where(values != values, 0x7FFFFFFF, order)


@triton.jit
def as_key(order, index):  # type: ignore[no-untyped-def]
    """One int64 per candidate: compares by order, then lowest index first."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def order_of_key(key):  # type: ignore[no-untyped-def]
    return (key >> 32).to(tl.int32)


@triton.jit
def index_of_key(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
