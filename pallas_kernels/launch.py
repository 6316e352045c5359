"""What every kernel here shares: how it is launched, and how a row of any width is cut into vectors of a warpgroup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdspark.ops.backends import compute_capability

Ref = Any
"""A ref of a kernel, or a part of one; JAX has no public type for it."""

WARPGROUP = 128
"""Threads that work as one: most kernels here run one warpgroup per program."""

WARP, WARPS = 32, 4
VECTOR_BYTES = 16
"""The widest load of one thread."""

MULTIPROCESSORS = 132
"""Of an H100 or H200: a launch divides its work among about as many programs. `grid_barrier` asks the GPU instead."""

SHARED_BYTES = 226 << 10
"""Of a program's shared memory on Hopper, what is left beside its barriers and a reduction's scratch."""

TILE = 64
"""Rows that a tensor core's instruction multiplies."""

CORE = 8
"""Rows that a tensor core reads together; shared memory is laid out in runs of 8 rows of 128 bytes."""

SWIZZLED: Any = (plgpu.TilingTransform((CORE, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


def why_no_wgmma() -> str | None:
    """None where a kernel may multiply with `wgmma`, which Hopper has and no other GPU so far, else the reason.

    A device without a compute capability is a CPU: one that runs the interpreter, or for which a kernel is lowered only.
    """
    capability = compute_capability()
    if capability is None or int(capability) == 9:
        return None
    return f"its kernels need Hopper's tensor cores (compute capability 9), this GPU has {capability}"


def interpreter() -> Any:
    """`interpret=` of a kernel: None on a GPU, elsewhere the GPU interpreter."""
    return None if jax.default_backend() == "gpu" else plgpu.InterpretGPUParams()


def launch(body: Callable[..., None], *, out_type: Any, grid: dict[str, int]) -> Callable[..., Any]:
    """A Mosaic GPU kernel over a named grid, one warpgroup per program; off a GPU it runs in the GPU interpreter.

    Refs that `body` writes in place (a pool) are passed as `jax.Ref` operands; `out_type` lists what it returns anew.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        # no kernel here reads memory that it writes, so the barriers around every store would only cost time
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter(),
    )


def program(axis: str, extent: int) -> jax.Array:
    """The index of this program along a grid axis of `extent` programs.

    The interpreter runs programs one after another; there they are counted from the last to the first, so that a program
    which fails to leave its place to a later one shows, as it may on a GPU.
    """
    index = lax.axis_index(axis)
    return index if jax.default_backend() == "gpu" else extent - 1 - index


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


_store: Any = getattr(plgpu, "store", None)


def store(target: Ref, values: jax.Array) -> None:
    """`target[...] = values` where threads write side by side too little for the widest accesses.

    JAX 0.12 refuses such a store unless it is told to make it, and JAX 0.11 has no way to be told.
    """
    if _store is None or not values.ndim:
        target[...] = values
    else:
        _store(target, values, optimized=False)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of a row that a warpgroup holds as one vector; a run of one element is held as a scalar."""

    start: int
    size: int
    vec: int
    """Adjacent elements per thread and load."""
    fresh: int
    """The first element that no earlier piece of the row covers: the last piece may reach back over its predecessor."""

    @property
    def layout(self) -> Any:
        """128 threads side by side, or, for less than 128 elements, one warp's lanes, repeated in all four warps."""
        if self.size % WARPGROUP == 0:
            return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)
        lanes = min(self.size, WARP)
        return plgpu.Layout.TILED(
            plgpu.Tiling(((lanes,), (1,))),
            warp_dims=(plgpu.Replicated(WARPS),),
            lane_dims=(-2,) if lanes == WARP else (plgpu.Replicated(WARP // lanes), -2),
            vector_dim=-1,
        )

    def load(self, row: Ref, start: Any = 0) -> jax.Array:
        """The piece of a one-dimensional ref that begins at `start`."""
        if self.size == 1:
            return row[start + self.start]
        return plgpu.load(row.at[pl.ds(start + self.start, self.size)], layout=self.layout, optimized=False)

    def store(self, row: Ref, values: jax.Array, start: Any = 0) -> None:
        """Write the piece of a one-dimensional ref; where pieces overlap they must hold the same values."""
        store(row.at[start + self.start if self.size == 1 else pl.ds(start + self.start, self.size)], values)

    def positions(self) -> jax.Array:
        """The index of every element within its row."""
        if self.size == 1:
            return jnp.int32(self.start)
        return plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout) + self.start

    def splat(self, value: Any, dtype: Any) -> jax.Array:
        """A constant or scalar as a vector of this piece."""
        if self.size == 1:
            return jnp.asarray(value, dtype)
        return plgpu.layout_cast(lax.broadcast(jnp.asarray(value, dtype), (self.size,)), self.layout)


def pieces(width: int, dtype: Any, *strides: int) -> tuple[Piece, ...]:
    """Cut a row of `width` elements into pieces.

    Widths that are no multiple of 128 (of a power of two below 128) end with a piece that overlaps the one before.

    Args:
        strides: distances between the starts of the rows this is used for, in elements: vector accesses are as wide as
            these and the width allow.
    """
    found: list[Piece] = []
    start = 0
    if width < WARPGROUP:
        size = 1 << (width.bit_length() - 1)
        return (Piece(0, size, 1, 0),) + ((Piece(width - size, size, 1, size),) if size < width else ())
    vec = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    while any(stride % vec for stride in strides):
        vec //= 2
    while width - start >= WARPGROUP:
        if width - start >= WARPGROUP * vec:
            size = (width - start) // (WARPGROUP * vec) * WARPGROUP * vec
            found.append(Piece(start, size, vec, start))
            start += size
        vec = max(vec // 2, 1)
    if start < width:
        found.append(Piece(width - WARPGROUP, WARPGROUP, 1, start))
    return tuple(found)


def zero(x: jax.Array) -> jax.Array:
    """0, but not at trace time: there the end of a copy must lie inside what it reads or writes."""
    return lax.rem(x, jnp.int32(1))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def total(vector: jax.Array) -> jax.Array:
    """The sum over an int32 vector, as a scalar."""
    return jnp.sum(vector, dtype=jnp.int32) if vector.ndim else vector


def largest(vector: jax.Array) -> jax.Array:
    """The maximum of an int32 vector, as a scalar."""
    return jnp.max(vector) if vector.ndim else vector


def smallest(vector: jax.Array) -> jax.Array:
    """The minimum of an int32 vector, as a scalar."""
    return jnp.min(vector) if vector.ndim else vector


def floor_mod(x: jax.Array, divisor: int) -> jax.Array:
    """`x mod divisor`, never negative, for a static positive divisor."""
    remainder = lax.rem(x, jnp.int32(divisor))
    return remainder + jnp.where(remainder < 0, jnp.int32(divisor), jnp.int32(0))


def floor_div(x: jax.Array, divisor: int) -> jax.Array:
    """`x // divisor` rounded down, for a static positive divisor."""
    return lax.div(x - floor_mod(x, divisor), jnp.int32(divisor))
