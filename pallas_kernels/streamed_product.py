"""Products of a few activation rows with weights that are read once: what a decode step at a small batch is made of.

Each program owns some rows of the weights and streams them through a ring in shared memory, as wide a stretch of the
contraction at a time as fits, so that all of the device's memory bandwidth is asked for at once; nothing is summed across
programs. What stands before and behind a product in the drafter is done where the numbers already are: the residual, SwiGLU,
and RMSNorm in two halves. `rms_norm(h, w) @ W` is `((h * w) @ W) * rsqrt(mean(h^2) + eps)`: the program that makes a part of
h writes `h * w` and the part's sum of squares, and the next product's programs multiply their fp32 sums by the row's factor.

With more rows of x a multiprocessor is busier with them than with the weights, which programs with more weight rows make up
for. Where there are too few such programs, a cluster of them divides the contraction: each leaves its sums in its own shared
memory, and each finishes some of the rows from what all have there.

Tensor cores multiply 64 rows at once and a program owns fewer. So `folds` chunks of the contraction lie one below the other,
the program's weight rows of each, and so do the same chunks of x. An instruction multiplies all with all; of its sums only
those of a chunk with itself mean something, blocks on the diagonal, and they are added at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdspark.drafter import ProductShape

from .cluster import RANK, cluster_barrier, load_of, meet
from .launch import (
    CORE,
    MULTIPROCESSORS,
    SHARED_BYTES,
    SWIZZLED,
    TILE,
    Ref,
    ceil_div,
    interpreter,
    store,
    struct,
    why_no_wgmma,
    zero,
)

CHUNKS = (512, 256, 128, 64)
"""How much of the contraction one copy may have."""

STAGE_BYTES, MAX_STAGES = 32 << 10, 16

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """One layer's weight within a stack, which is not copied out of it."""

    stack: jax.Array
    """`[L, N, K]`"""
    layer: int = dataclasses.field(metadata={"static": True})


class Result(NamedTuple):
    """What became of one product."""

    values: Any
    """`[rows, N]`; None if a norm follows and there is no residual."""
    normed: Any
    """The values' `Normed`; None if no norm follows."""


MAX_ROWS = 256
"""Rows that an instruction multiplies and the copy engine brings at once."""

FEW_ROWS = 64
"""Up to so many a program takes in little enough of x: none shares its contraction, and XLA's wide products are no faster."""


def unsupported_rows(rows: int, dtypes: Sequence[str]) -> str | None:
    """None if products of so many rows with weights of these dtypes can run here, else the reason."""
    if jax.default_backend() != "gpu":
        return "off a GPU its copies and products are threads of an interpreter, too slow for a step"
    if reason := why_no_wgmma():
        return reason
    if tuple(dtypes) != ("bfloat16",):
        return f"its kernels multiply bfloat16, the weights are {', '.join(dtypes)}"
    if rows > MAX_ROWS:
        return f"it has {rows} rows, its kernels are for up to {MAX_ROWS}"
    return None


def unsupported(shape: ProductShape) -> str | None:
    """None if the kernel can run this product here, else the reason."""
    if reason := unsupported_rows(shape.rows, shape.dtypes):
        return reason
    for name, N, K in shape.weights:
        if N % CORE or K % TILE:
            return f"{name} is [{N}, {K}], its kernel needs multiples of {CORE} and {TILE}"
    return None


def padded(rows: int) -> int:
    """How many rows `streamed_product` is given for so many: a multiple of 8, of 16 where two programs may divide them."""
    step = CORE if rows <= FEW_ROWS else 2 * CORE
    return ceil_div(rows, step) * step


def whole_rows(x: jax.Array) -> jax.Array:
    """`[padded(rows), ...]`, zeros behind the last row; up to 8 rows are left as they are."""
    missing = 0 if x.shape[0] <= CORE else padded(x.shape[0]) - x.shape[0]
    return jnp.pad(x, ((0, missing), *((0, 0) for _ in x.shape[1:]))) if missing else x


def normed_rows(h: jax.Array, norm: jax.Array) -> Normed:
    """`Normed` of `[rows, N]` that no kernel here made; as many parts as a layout has columns."""
    wide = h.astype(jnp.float32)
    squares = jnp.sum(wide.reshape(h.shape[0], CORE, -1) ** 2, axis=-1)
    return Normed((wide * norm.astype(jnp.float32)).astype(h.dtype), squares)


CLUSTERS = (2, 4)
"""Programs that may divide a contraction."""

LEAST_STRETCH = 1024
"""Of the contraction, for each of them: less costs no more time than their meeting does."""

MEETING_BYTES = 96 << 10
"""What a multiprocessor takes in while a cluster's programs wait for each other."""


def rows_and_cluster(
    widths: Sequence[int], rows: int, K: int, programs: int, *, gated: bool = False, group: int | None = None
) -> tuple[int, int]:
    """Weight rows per program, a multiple of 8 that divides every result, and how many programs divide the contraction: those
    with which the busiest multiprocessor, one of `programs`, copies least, x's rows for each program counted.

    A gated product owns as many rows of the gate as of the other factor; a program of a grouped one stays inside a group.
    """
    sides = 2 if gated else 1
    divided = [*widths, *([] if group is None else [group])]
    fitting = [r for r in range(TILE, 0, -CORE * sides) if all(n * sides % r == 0 for n in divided)]
    if not fitting:
        raise ValueError(f"streamed_product: weights of {divided} rows do not divide into runs of {CORE} rows")

    def copied(owned: int, cluster: int) -> int:
        tiles = sum(n * sides // owned for n in widths)
        # a cluster lies in one part of the GPU, whose multiprocessors need not be a multiple of 4
        at_once = programs // cluster - (cluster > 2)
        return ceil_div(tiles, at_once) * (owned + rows) * K * 2 // cluster + MEETING_BYTES * (cluster > 1)

    def possible(cluster: int) -> bool:
        whole = rows % (CORE * cluster) == 0 and K % (CHUNKS[-1] * cluster) == 0
        return whole and LEAST_STRETCH * cluster <= K and programs >= 2 * cluster

    # in the interpreter no program knows another's memory
    divisible = rows > FEW_ROWS and group is None and jax.default_backend() == "gpu"
    clusters = [1, *(c for c in CLUSTERS if divisible and possible(c))]
    return min(itertools.product(fitting, clusters), key=lambda choice: copied(*choice))


@dataclasses.dataclass(frozen=True)
class Division:
    """How a launch is divided among its programs, and how a program's ring is laid out."""

    tiles: tuple[int, ...]
    """Programs of each result, one result's after the other's."""
    columns: int
    """Of a result, per program."""
    owned: int
    """Weight rows per program: two for each column of a gated product."""
    chunk: int
    folds: int
    """Chunks of a step."""
    steps: int
    stages: int
    """Steps that the ring holds."""
    cluster: int
    """Programs that divide the contraction, each so many steps."""

    @classmethod
    def of(cls, widths: Sequence[int], rows: int, K: int, programs: int, *, gated: bool, group: int | None) -> Division:
        """Of results of these widths; `group`: how many columns belong to one weight of a grouped product."""
        if K % CHUNKS[-1] or rows % CORE:
            raise ValueError(f"streamed_product: x is [{rows}, {K}], expected rows in multiples of {CORE}, K of {CHUNKS[-1]}")
        owned, cluster = rows_and_cluster(widths, rows, K, programs, gated=gated, group=group)
        fitting = max(1, TILE // max(owned, rows))
        narrow = [c for c in CHUNKS if K % (c * cluster) == 0 and fitting * (owned + rows) * c * 2 <= STAGE_BYTES]
        chunk = max(narrow, default=CHUNKS[-1])
        chunks = K // chunk // cluster
        folds = next(f for f in range(fitting, 0, -1) if chunks % f == 0)
        unused = (TILE - folds * owned) * chunk * 2  # what the multiplication of the last stage reads behind it
        ring_bytes = SHARED_BYTES - TILE * folds * rows * 4 - (2 << 10)  # the sums, and what a norm's reductions take
        stages = min(chunks // folds, MAX_STAGES, (ring_bytes - unused) // (folds * (owned + rows) * chunk * 2))
        columns = owned // 2 if gated else owned
        return cls(tuple(n // columns for n in widths), columns, owned, chunk, folds, chunks // folds, stages, cluster)


class Refs(NamedTuple):
    """A launch's operands and results in global memory; None or empty for what it does without."""

    x: Ref
    weights: list[Ref]
    square_sums: Ref | None
    residual: Ref | None
    norms: list[Ref]
    results: list[tuple[Ref, Ref, Ref]]
    """Values, scaled rows and square sums of each result."""


# equal layers share one kernel, but those with a `Stacked` weight
@functools.partial(jax.jit, static_argnames=("eps", "gated", "out_dtype", "name", "programs"))
def streamed_product(
    x: jax.Array | Normed,
    weights: Sequence[jax.Array | Stacked],
    *,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    next_norms: Sequence[jax.Array | None] | None = None,
    gated: bool = False,
    out_dtype: Any = None,
    name: str = "streamed_product",
    programs: int = MULTIPROCESSORS,
) -> list[Result]:
    """`x @ w.T` of each weight, summed in fp32, in one launch.

    Args:
        x: `[rows, K]`, bf16, K a multiple of 64. Or `[rows, G, K]`: G products, with the one weight `[G, N, K]`. `Normed`: the
            factor that is still missing is multiplied in. Fewer than 8 rows become 8, more must be a multiple of 8.
        weights: each `[N, K]`, in x's dtype. N a multiple of 8.
        eps: of the norm of x.
        residual: `[rows, N]`, added to the rounded product of the only weight, rounded again.
        next_norms: for each result the weight `[N]` of the RMSNorm that follows it, or None.
        gated: the two weights are a SwiGLU's gate and the other factor; the result is one, `silu(x @ gate.T) * (x @ up.T)`.
        out_dtype: of the values, which are rounded to x's dtype all the same; by default that.
        name: of the kernel, in a profile.
        programs: how many run at once.
    """
    normed = x if isinstance(x, Normed) else None
    operand = x.scaled if isinstance(x, Normed) else x
    rows, K, dtype = max(operand.shape[0], CORE), operand.shape[-1], operand.dtype
    grouped = operand.ndim == 3
    stacks = [w.stack if isinstance(w, Stacked) else w for w in weights]
    layers = [w.layer if isinstance(w, Stacked) else None for w in weights]
    sides = 2 if gated else 1
    group = stacks[0].shape[1] if grouped else None
    widths = [w.shape[-2] * (operand.shape[1] if grouped else 1) for w in stacks[::sides]]
    norms = list(next_norms) if next_norms is not None else [None] * len(widths)
    keeps_values = [residual is not None or norm is None for norm in norms]
    division = Division.of(widths, rows, K, programs, gated=gated, group=group)
    chunk, owned, columns, folds, stages = division.chunk, division.owned, division.columns, division.folds, division.stages
    firsts = [sum(division.tiles[:i]) for i in range(len(widths))]
    parts = [ceil_div(count, CORE) * CORE for count in division.tiles]
    rows_each = rows // division.cluster
    turns = ceil_div(rows_each, TILE)  # for the sake of registers
    rows_at_once = ceil_div(rows_each, turns * CORE) * CORE

    def named(refs: Sequence[Ref]) -> tuple[Refs, list[Ref]]:
        """The launch's refs, in the order of its operands and results, and its scratch behind them."""
        rest: Iterator[Ref] = iter(refs)

        def take(there: bool) -> Ref | None:
            return next(rest) if there else None

        operands = (
            next(rest), [next(rest) for _ in stacks], take(normed is not None), take(residual is not None),
            [take(norm is not None) for norm in norms],
        )  # fmt: skip
        results = [(take(keeps), take(norm is not None), take(norm is not None)) for keeps, norm in zip(keeps_values, norms)]
        return Refs(*operands, results), list(rest)

    def stream(*refs: Ref) -> None:
        gmem, (w_smem, x_smem, sums_smem, full, free, *meetings) = named(refs)
        tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
        rank = lax.axis_index(RANK) if division.cluster > 1 else 0

        def rows_of(turn: int, fold: int = 0) -> pl.Slice:
            """Those of a fold that this program finishes in a turn; the last may repeat some of the one before."""
            start = fold * rows + rank * rows_each + min(turn * rows_at_once, rows_each - rows_at_once)
            return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, CORE), rows_at_once)

        def for_result(act: Callable[[int, Any], None]) -> None:
            """Call `act(i, number)`: this program makes part `number` of result i."""
            for i, (first, count) in enumerate(zip(firsts, division.tiles)):
                pl.when((tile >= first) & (tile < first + count))(functools.partial(act, i, tile - first))

        @pl.when(warpgroup == COPIER)
        def _copy() -> None:
            def copy(step: jax.Array, _: None) -> None:
                slot = lax.rem(step, jnp.int32(stages))

                @pl.when(step >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(free.at[slot])

                x_rows = pl.ds(zero(step), rows)  # behind x's last row the copy engine fills up with zeros

                def copy_for(i: int, number: Any) -> None:
                    start = number * columns
                    of_group = lax.div(start, jnp.int32(group)) if group else None
                    start = lax.rem(start, jnp.int32(group)) if group else start
                    for fold in range(folds):
                        first = ((rank * division.steps + step) * folds + fold) * chunk
                        stretch = pl.ds(pl.multiple_of(first, 64), chunk)
                        x_source = gmem.x.at[x_rows, of_group, stretch] if grouped else gmem.x.at[x_rows, stretch]
                        x_place = x_smem.at[slot, pl.ds(fold * rows, rows)]
                        plgpu.copy_gmem_to_smem(x_source, x_place, full.at[slot])
                        for side in range(sides):
                            one = of_group if grouped else layers[i + side]
                            w_rows = pl.ds(pl.multiple_of(start, CORE), columns)
                            weight = gmem.weights[i + side]
                            source = weight.at[w_rows, stretch] if one is None else weight.at[one, w_rows, stretch]
                            row = (slot * folds + fold) * owned + side * columns
                            place = w_smem.at[pl.ds(pl.multiple_of(row, CORE), columns)]
                            plgpu.copy_gmem_to_smem(source, place, full.at[slot])

                for_result(copy_for)

            lax.fori_loop(0, division.steps, copy, None)

        @pl.when(warpgroup == MULTIPLIER)
        def _multiply() -> None:
            of_tile = pl.ds(pl.multiple_of(tile * columns, CORE), columns)  # where there is but one result

            def known(turn: int) -> tuple[jax.Array | None, jax.Array | None]:
                """What does not depend on the product: the norm's factor of each row, and the residual."""
                factor = added = None
                if gmem.square_sums is not None:
                    square_sums = plgpu.load(gmem.square_sums.at[rows_of(turn)], layout=ROWS_BY_COLUMNS, optimized=False)
                    factor = lax.rsqrt(jnp.sum(square_sums, axis=1) * jnp.float32(1 / K) + jnp.float32(eps))
                if gmem.residual is not None:
                    residual = gmem.residual.at[rows_of(turn), of_tile]
                    added = plgpu.load(residual, layout=ROWS_BY_COLUMNS, optimized=False).astype(jnp.float32)
                return factor, added

            ahead = known(0)  # on its way while the product is made
            known_norm = load_norm(gmem.norms[0], of_tile) if len(widths) == 1 and gmem.norms[0] is not None else None
            store(sums_smem, sums(w_smem, x_smem, full, free, division))
            if meetings:
                meet(meetings[0])

            def side(index: int, turn: int, factor: jax.Array | None) -> jax.Array:
                """`[rows, columns]` of the sums, with the norm's factor, rounded as a product is."""
                loaded = [
                    load_of(
                        sums_smem.transpose((1, 0)).at[rows_of(turn, fold), pl.ds(fold * owned + index * columns, columns)],
                        member, ROWS_BY_COLUMNS, division.cluster,
                    )
                    for member in range(division.cluster)
                    for fold in range(folds)
                ]  # fmt: skip
                values = functools.reduce(operator.add, loaded)
                if factor is not None:
                    values = values * lax.broadcast_in_dim(factor, values.shape, [0])
                return values.astype(dtype).astype(jnp.float32)

            def finish(i: int, number: Any) -> None:
                for turn in range(turns):
                    finish_rows(i, number, turn, *(known(turn) if turn else ahead))

            def finish_rows(i: int, number: Any, turn: int, factor: jax.Array | None, added: jax.Array | None) -> None:
                place = pl.ds(pl.multiple_of(number * columns, CORE), columns)
                values = side(0, turn, factor)
                if gated:
                    values = values / (1 + jnp.exp(-values)) * side(1, turn, factor)
                if added is not None:
                    values = values + added
                values = values.astype(dtype)
                values_ref, scaled_ref, squares_ref = gmem.results[i]
                if values_ref is not None:
                    store(values_ref.at[rows_of(turn), place], values.astype(values_ref.dtype))
                if scaled_ref is None:
                    return
                values = values.astype(jnp.float32)
                norm = load_norm(gmem.norms[i], place) if known_norm is None else known_norm
                scaled = values * lax.broadcast_in_dim(norm, values.shape, [1])
                store(scaled_ref.at[rows_of(turn), place], scaled.astype(dtype))
                store(squares_ref.at[rows_of(turn), number], jnp.sum(values * values, axis=1))
                if parts[i] > division.tiles[i]:
                    fill_zeros(squares_ref.at[rows_of(turn)], number, division.tiles[i], parts[i])

            for_result(finish)
            if meetings:
                meet(meetings[1])  # no program ends, and takes its memory with it, while another reads there

    def load_norm(norm: Ref, place: pl.Slice) -> jax.Array:
        return plgpu.load(norm.at[place], layout=ROWS_BY_COLUMNS.reduce(0), optimized=False).astype(jnp.float32)

    def fill_zeros(squares_ref: Ref, number: Any, first: int, end: int) -> None:
        @pl.when(number == 0)
        def _fill() -> None:
            for part in range(first, end):
                zeros = plgpu.layout_cast(jnp.zeros((rows_at_once,), jnp.float32), ROWS_BY_COLUMNS.reduce(1))
                store(squares_ref.at[:, part], zeros)

    stream.__name__ = name
    out_types = []
    for keeps, norm, width, part in zip(keeps_values, norms, widths, parts):
        out_types += [struct((rows, width), dtype if out_dtype is None else out_dtype)] * keeps
        if norm is not None:
            out_types += [struct((rows, width), dtype), struct((rows, part), jnp.float32)]
    found = plgpu.kernel(
        stream,
        out_type=tuple(out_types),
        grid=(sum(division.tiles),),
        grid_names=("tile",),
        cluster=(division.cluster,) if division.cluster > 1 else (),
        cluster_names=(RANK,) if division.cluster > 1 else (),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(((stages - 1) * folds * owned + TILE, chunk), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, folds * rows, chunk), dtype, transforms=SWIZZLED),
            plgpu.SMEM((TILE, folds * rows), jnp.float32),
            plgpu.Barrier(num_arrivals=folds * (1 + sides), num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            *([cluster_barrier(), cluster_barrier()] if division.cluster > 1 else []),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(),
    )(
        operand, *stacks, *([] if normed is None else [normed.square_sums]), *([] if residual is None else [residual]),
        *(norm for norm in norms if norm is not None),
    )  # fmt: skip
    arrays = iter(found)
    return [
        Result(next(arrays) if keeps else None, Normed(next(arrays), next(arrays)) if norm is not None else None)
        for keeps, norm in zip(keeps_values, norms)
    ]


def sums(w_smem: Ref, x_smem: Ref, full: Ref, free: Ref, division: Division) -> jax.Array:
    """`[64, folds * rows]`: a program's weights times x, step by step. Only sums of a chunk with itself have a meaning."""
    folded_rows, stages = x_smem.shape[1], division.stages
    if jax.default_backend() != "gpu":
        return interpreted_sums(w_smem, x_smem, full, free, division)

    def accumulate(accumulator: Ref) -> jax.Array:
        def multiply(step: jax.Array, _: None) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            # with rows of the stages behind it
            w = w_smem.at[pl.ds(pl.multiple_of(slot * division.folds * division.owned, CORE), TILE)]
            plgpu.wgmma(accumulator, w, x_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def _free() -> None:
                plgpu.barrier_arrive(free.at[lax.rem(step - 1, jnp.int32(stages))])

        lax.fori_loop(0, division.steps, multiply, None)
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((TILE, folded_rows), jnp.float32))


def interpreted_sums(w_smem: Ref, x_smem: Ref, full: Ref, free: Ref, division: Division) -> jax.Array:
    """`sums` for the interpreter, which has no tensor cores."""
    folded_rows, stages, filled = x_smem.shape[1], division.stages, division.folds * division.owned

    def multiply(step: jax.Array, total: jax.Array) -> jax.Array:
        slot = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(full.at[slot])
        w = w_smem[pl.ds(slot * filled, filled)].astype(jnp.float32)
        total = total + w @ x_smem[slot].astype(jnp.float32).T

        @pl.when(step + stages < division.steps)
        def _free() -> None:
            plgpu.barrier_arrive(free.at[slot])

        return total

    total = lax.fori_loop(0, division.steps, multiply, jnp.zeros((filled, folded_rows), jnp.float32))
    return jnp.concatenate([total, jnp.zeros((TILE - filled, folded_rows), jnp.float32)])
