"""Products of a few activation rows with weights that are read once: what a decode step at a small batch is made of.

Each program owns some rows of the weights and streams them through a ring in shared memory, as wide a stretch of the
contraction at a time as fits, so that all of the device's memory bandwidth is asked for at once; nothing is summed across
programs. What stands before and behind a product in the drafter is done where the numbers already are: the residual, SwiGLU,
and RMSNorm in two halves. `rms_norm(h, w) @ W` is `((h * w) @ W) * rsqrt(mean(h^2) + eps)`: the program that makes a part of
h writes `h * w` and the part's sum of squares, and the next product's programs multiply their fp32 sums by the row's factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import Ref, ceil_div, struct

PROGRAMS = 132
"""The multiprocessors of an H100 or H200: a launch has about as many programs."""

TILE = 64
"""Rows that a tensor core instruction multiplies; a program that owns fewer ignores the others' sums."""

CORE = 8
"""Rows that a tensor core reads together; shared memory is laid out in runs of 8 rows of 128 bytes."""

SWIZZLED: Any = (plgpu.TilingTransform((CORE, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]

CHUNKS = (512, 256, 128, 64)
"""How much of the contraction a stage of the ring may hold."""

STAGE_BYTES, RING_BYTES, MAX_STAGES = 32 << 10, 208 << 10, 16

COPIER, MULTIPLIER = 0, 1
"""Warpgroups of a program."""

ROWS_BY_COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((CORE, CORE), (2, CORE), (1,))),
    warp_dims=(-5,),
    lane_dims=(plgpu.Replicated(2), -3, -2),
    vector_dim=-1,
)
"""Of results `[rows, columns]`: each warp holds two of eight rows, each lane one of eight columns."""


class Normed(NamedTuple):
    """RMSNorm of `[rows, N]` but for each row's factor `rsqrt(mean(h^2) + eps)`."""

    scaled: jax.Array
    """`[rows, N]`: the rows times the norm's weight, rounded."""
    square_sums: jax.Array
    """`[rows, parts]` fp32: sums of squares of parts of each row."""


class Stacked(NamedTuple):
    """One layer's weight within a stack, which is not copied out of it."""

    stack: jax.Array
    """`[L, N, K]`"""
    index: int


class Result(NamedTuple):
    """What became of one product."""

    values: jax.Array | None
    """`[rows, N]`, if there is a residual or no norm follows."""
    normed: Normed | None
    """The norm of the values, where one follows."""


def normed_rows(h: jax.Array, norm: jax.Array) -> Normed:
    """`Normed` of `[rows, N]` that no kernel here made; as many parts as a layout has columns."""
    wide = h.astype(jnp.float32)
    squares = jnp.sum(wide.reshape(h.shape[0], CORE, -1) ** 2, axis=-1)
    return Normed((wide * norm.astype(jnp.float32)).astype(h.dtype), squares)


def rows_per_program(sizes: Sequence[int], programs: int, *, gated: bool = False) -> int:
    """The fewest weight rows per program, a multiple of 8 that divides every weight, for which all programs run at once.

    A gated product owns as many rows of the gate as of the other factor.
    """
    sides = 2 if gated else 1
    fitting = [r for r in range(CORE * sides, TILE + 1, CORE * sides) if all(n * sides % r == 0 for n in sizes)]
    if not fitting:
        raise ValueError(f"streamed_product: weights of {list(sizes)} rows do not divide into runs of {CORE * sides} rows")
    return next((r for r in fitting if sum(n * sides // r for n in sizes) <= programs), fitting[-1])


def streamed_product(
    x: jax.Array | Normed,
    weights: Sequence[jax.Array | Stacked],
    *,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    next_norms: Sequence[jax.Array | None] | None = None,
    gated: bool = False,
    name: str = "streamed_product",
    programs: int = PROGRAMS,
) -> list[Result]:
    """`x @ w.T` of each weight, summed in fp32, in one launch.

    Args:
        x: `[rows, K]`, bf16, K a multiple of 64. Or `[rows, G, K]`: G products, with the one weight `[G, N, K]`. `Normed`: the
            factor that is still missing is multiplied in. Fewer than 8 rows become 8, more must be a multiple of 8.
        weights: each `[N, K]`, in x's dtype. N a multiple of 8.
        eps: of the norm of x.
        residual: `[rows, N]`, added to the rounded product, rounded again.
        next_norms: for each weight the weight `[N]` of the RMSNorm of its result, or None.
        gated: the two weights are a SwiGLU's gate and the other factor; the result is one, `silu(x @ gate.T) * (x @ up.T)`.
    """
    normed = x if isinstance(x, Normed) else None
    operand = x.scaled if isinstance(x, Normed) else x
    rows, K = max(operand.shape[0], CORE), operand.shape[-1]
    grouped = operand.ndim == 3
    stacks = [w.stack if isinstance(w, Stacked) else w for w in weights]
    layers = [w.index if isinstance(w, Stacked) else None for w in weights]
    sizes = [w.shape[-2] for w in stacks]
    outputs = sizes[:1] if gated else sizes
    groups = operand.shape[1] if grouped else 1
    norms = list(next_norms) if next_norms is not None else [None] * len(outputs)
    owned = rows_per_program([n * groups for n in outputs] if grouped else outputs, programs, gated=gated)
    if grouped:
        while sizes[0] % owned:
            owned -= CORE
    sides = 2 if gated else 1
    columns = owned // sides  # of the result, per program
    tiles = [groups * n // columns for n in outputs]
    firsts = [sum(tiles[:i]) for i in range(len(tiles))]
    chunk = next(c for c in CHUNKS if K % c == 0 and ((owned + rows) * c * 2 <= STAGE_BYTES or c == CHUNKS[-1]))
    chunks = K // chunk
    unused = (TILE - owned) * chunk * 2  # what the last stage's multiplication reads behind it
    stages = min(chunks, MAX_STAGES, (RING_BYTES - unused) // ((owned + rows) * chunk * 2))
    per_group = tiles[0] // groups
    keeps_values = [residual is not None or norm is None for norm in norms]
    parts = [ceil_div(t, CORE) * CORE for t in tiles]

    def body(*refs: Ref) -> None:
        taken: Iterator[Ref] = iter(refs)
        x_ref = next(taken)
        weight_refs = [next(taken) for _ in weights]
        sums_ref = None if normed is None else next(taken)
        residual_ref = None if residual is None else next(taken)
        norm_refs = [None if norm is None else next(taken) for norm in norms]
        out_refs = [
            (next(taken) if keeps else None, *((next(taken), next(taken)) if norm is not None else (None, None)))
            for keeps, norm in zip(keeps_values, norms)
        ]
        w_smem, x_smem, out_smem, full, free = taken
        tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")

        def for_output(act: Callable[[int, Any], None]) -> None:
            """Call `act(i, number)` for the output that this program makes a part of: its `number`-th."""
            for i, (first, count) in enumerate(zip(firsts, tiles)):
                pl.when((tile >= first) & (tile < first + count))(lambda i=i, first=first: act(i, tile - first))

        @pl.when(warpgroup == COPIER)
        def _copy() -> None:
            def copy(c: jax.Array, _: None) -> None:
                slot = lax.rem(c, jnp.int32(stages))

                @pl.when(c >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                stretch = pl.ds(pl.multiple_of(c * chunk, 64), chunk)

                def weight_rows(i: int, number: Any) -> None:
                    group, part = (
                        (lax.div(number, jnp.int32(per_group)), lax.rem(number, jnp.int32(per_group)))
                        if grouped
                        else (None, number)
                    )
                    # zero, but not at trace time: there a copy must end inside x, and the engine fills up with zeros
                    first_row = lax.rem(c, jnp.int32(1))
                    x_rows = (pl.ds(first_row, rows), *([group] if grouped else []), stretch)
                    plgpu.copy_gmem_to_smem(x_ref.at[x_rows], x_smem.at[slot], full.at[slot])
                    for side in range(sides):
                        of_weight = group if grouped else layers[i + side]
                        w_rows = (pl.ds(pl.multiple_of(part * columns, CORE), columns), stretch)
                        source = weight_refs[i + side].at[w_rows if of_weight is None else (of_weight, *w_rows)]
                        place = pl.ds(pl.multiple_of(slot * owned + side * columns, CORE), columns)
                        plgpu.copy_gmem_to_smem(source, w_smem.at[place], full.at[slot])

                for_output(weight_rows)

            lax.fori_loop(0, chunks, copy, None)

        @pl.when(warpgroup == MULTIPLIER)
        def _multiply() -> None:
            factor = None
            if sums_ref is not None:
                sums = plgpu.load(sums_ref, layout=ROWS_BY_COLUMNS, optimized=False)
                factor = lax.rsqrt(jnp.sum(sums, axis=1) * jnp.float32(1 / K) + jnp.float32(eps))

            def accumulate(accumulator: Ref) -> jax.Array:
                def multiply(c: jax.Array, _: None) -> None:
                    slot = lax.rem(c, jnp.int32(stages))
                    plgpu.barrier_wait(full.at[slot])
                    # rows behind the program's own are other stages': their sums are ignored
                    w = w_smem.at[pl.ds(pl.multiple_of(slot * owned, CORE), TILE)]
                    plgpu.wgmma(accumulator, w, x_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                    @pl.when(c > 0)
                    def _free() -> None:
                        plgpu.barrier_arrive(free.at[lax.rem(c - 1, jnp.int32(stages))])

                lax.fori_loop(0, chunks, multiply, None)
                return accumulator[...]

            if jax.default_backend() == "gpu":
                out_smem[...] = pl.run_scoped(accumulate, plgpu.ACC((TILE, rows), jnp.float32))
            else:
                out_smem[...] = interpreted_sums(w_smem, x_smem, full, free, chunks, stages, owned, rows)

            def side(index: int) -> jax.Array:
                """`[rows, columns]` of the sums, with the norm's factor, rounded as a product is."""
                found = out_smem.transpose((1, 0)).at[:, pl.ds(index * columns, columns)]
                values = plgpu.load(found, layout=ROWS_BY_COLUMNS, optimized=False)
                if factor is not None:
                    values = values * lax.broadcast_in_dim(factor, values.shape, [0])
                return values.astype(operand.dtype).astype(jnp.float32)

            def finish(i: int, number: Any) -> None:
                place = pl.ds(pl.multiple_of(number * columns, CORE), columns)
                values = side(0)
                if gated:
                    values = values / (1 + jnp.exp(-values)) * side(1)
                if residual_ref is not None:
                    values += plgpu.load(residual_ref.at[:, place], layout=ROWS_BY_COLUMNS, optimized=False).astype(jnp.float32)
                rounded = values.astype(operand.dtype)
                values_ref, scaled_ref, squares_ref = out_refs[i]
                if values_ref is not None:
                    values_ref[:, place] = rounded
                if norm_refs[i] is not None:
                    values = rounded.astype(jnp.float32)
                    norm = plgpu.load(norm_refs[i].at[place], layout=ROWS_BY_COLUMNS.reduce(0), optimized=False)
                    scaled = values * lax.broadcast_in_dim(norm.astype(jnp.float32), values.shape, [1])
                    scaled_ref[:, place] = scaled.astype(operand.dtype)
                    squares_ref[:, number] = jnp.sum(values * values, axis=1)
                    if parts[i] > tiles[i]:
                        _fill(squares_ref, number, tiles[i], parts[i])

            for_output(finish)

    def _fill(squares_ref: Ref, number: Any, first: int, end: int) -> None:
        @pl.when(number == 0)
        def _zeros() -> None:
            for part in range(first, end):
                zeros = jnp.zeros((rows,), jnp.float32)
                squares_ref[:, part] = plgpu.layout_cast(zeros, ROWS_BY_COLUMNS.reduce(1))

    body.__name__ = name
    out_types = []
    for keeps, norm, n, part in zip(keeps_values, norms, outputs, parts):
        out_types += [struct((rows, groups * n), operand.dtype)] * keeps
        if norm is not None:
            out_types += [struct((rows, n), operand.dtype), struct((rows, part), jnp.float32)]
    found = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(sum(tiles),),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((stages * owned + TILE - owned, chunk), operand.dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, rows, chunk), operand.dtype, transforms=SWIZZLED),
            plgpu.SMEM((TILE, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + sides, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=None if jax.default_backend() == "gpu" else plgpu.InterpretGPUParams(),
    )(
        operand, *stacks, *([] if normed is None else [normed.square_sums]), *([] if residual is None else [residual]),
        *(norm for norm in norms if norm is not None),
    )  # fmt: skip
    arrays = iter(found)
    return [
        Result(next(arrays) if keeps else None, Normed(next(arrays), next(arrays)) if norm is not None else None)
        for keeps, norm in zip(keeps_values, norms)
    ]


def interpreted_sums(
    w_smem: Ref, x_smem: Ref, full: Ref, free: Ref, chunks: int, stages: int, owned: int, rows: int
) -> jax.Array:
    """The multiplier's loop for the interpreter, which has no tensor cores."""

    def multiply(c: jax.Array, total: jax.Array) -> jax.Array:
        slot = lax.rem(c, jnp.int32(stages))
        plgpu.barrier_wait(full.at[slot])
        w = w_smem[pl.ds(slot * owned, owned)].astype(jnp.float32)
        total = total + w @ x_smem[slot].astype(jnp.float32).T

        @pl.when(c + stages < chunks)
        def _free() -> None:
            plgpu.barrier_arrive(free.at[slot])

        return total

    sums = lax.fori_loop(0, chunks, multiply, jnp.zeros((owned, rows), jnp.float32))
    return jnp.concatenate([sums, jnp.zeros((TILE - owned, rows), jnp.float32)])
