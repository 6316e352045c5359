"""Device values made safe inside a kernel, as in `jdspark.ops.safety`."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def safe_slots(slots, DUMMY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slots outside `[0, DUMMY]` become the dummy slot."""
    return tl.where((slots < 0) | (slots > DUMMY), DUMMY, slots).to(tl.int32)


@triton.jit
def clip(values, LOW: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers clipped to `[LOW, HIGH]`, as int32; they are compared in their own width."""
    return tl.minimum(tl.maximum(values, LOW), HIGH).to(tl.int32)


@triton.jit
def floor_remainder(positions, page_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """`positions % page_size` in `[0, page_size)`: Triton's own `%` takes the sign of a negative position."""
    remainder = positions % page_size
    return tl.where(remainder < 0, remainder + page_size, remainder)
