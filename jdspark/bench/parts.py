"""The parts of the benchmark: each yields rows as they are measured and never raises for one that fails."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import Geometry, StepOptions
from ..ops.backends import why_unavailable
from ..params import DrafterParams
from ..state import DecodeState
from ..step import DecodeStep, kernel_shapes
from . import bookkeeping, step_parts, whole_step
from .bookkeeping import BACKENDS, Carried, Ready
from .clock import Deadline, Figures, Variant, built, compile_all, describe, in_turn, measure, measure_alone, trace_all
from .floors import floor_us, step_bytes
from .scale import NO_CELL, Cell, Scale, draw_inputs, filled_state
from .step_parts import PART_OPS, PartRun, cache_flush, part_backends, why_no_part

FLUSHED_BYTES = 1 << 30
"""Many times any cache: the flush takes so long that the host has launched the part behind it by then."""

INTERPRETER = "without a GPU this would time an interpreter"
NO_TIME = "the time limit was near"
FULL_RUN = "it takes a full run"
LONG_TO_TRACE = "it takes the longest to trace"
FIRST_LOOK = "a first look, by itself"
"""The note of a row that the same row replaces once all variants of its cell have run in turn."""
LOOK_ROUNDS = 3
"""Of a first look."""

SMALLEST_FLOOR_US = 0.5
"""A ratio to less would say nothing."""

Build = dict[str, Callable[[], Variant]]


@dataclasses.dataclass
class Row:
    """One line of the result."""

    part: str
    """`bookkeeping`, `bookkeeping and acceptance`, `torch.compile`, `step`, or `part` for one part of a step; in a row about a
    whole job what `--parts` calls it."""
    name: str
    """The variant; of a part: its name and backend."""
    B: int
    context: int
    columns: int
    """Of the page tables."""
    figures: Figures = dataclasses.field(default_factory=Figures)
    left_out: str = ""
    """Why it was not measured: not there on this machine, or no time for it. What broke is in `figures.error`."""
    bytes: int | None = None
    """What the floor counts, see `part_bytes`."""
    floor_us: float | None = None
    """The time that a copy of these bytes takes, read and written counted, at the bandwidth measured in the same run."""
    at_s: float | None = None
    """Seconds since the part began."""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What the row is about: of two rows with one key the later one counts."""
        return self.part, self.name, self.B, self.context

    @property
    def ratio(self) -> float | None:
        """Device time over the floor; None for a floor of next to nothing."""
        if self.figures.device_us is None or self.floor_us is None or self.floor_us < SMALLEST_FLOOR_US:
            return None
        return self.figures.device_us / self.floor_us

    def to_json(self) -> dict[str, Any]:
        """All fields in one flat object."""
        fields = dataclasses.asdict(self)
        figures = fields.pop("figures")
        return {**fields, "ratio": self.ratio, **figures}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The inverse of `to_json`."""
        of_figures = {field.name for field in dataclasses.fields(Figures)}
        own = {name: value for name, value in fields.items() if name not in of_figures and name != "ratio"}
        return cls(**own, figures=Figures(**{name: fields[name] for name in of_figures}))


@dataclasses.dataclass(frozen=True)
class Run:
    """What all parts share."""

    scale: Scale
    on_gpu: bool
    bandwidth: float
    """Bytes per second of a copy, read and written counted."""
    seed: int
    deadline: Deadline
    turn: Callable[[], None] = lambda: None
    """Called when all is prepared and timing begins: a process that prepares beside others waits there for its turn, once."""

    def unavailable(self, backend: str) -> str:
        """Why a backend of JAX is not measured on this machine; empty if it is."""
        if backend == "pallas" and not self.on_gpu:
            return INTERPRETER
        return why_unavailable(backend) or ""

    def rng(self, cell: Cell) -> np.random.Generator:
        """For the operands of a cell."""
        return np.random.default_rng([self.seed, *cell])

    def measured(
        self, part: str, cell: Cell, columns: int, build: Build, left_out: dict[str, str], *, calls: int
    ) -> Iterator[Row]:
        """Rows of one cell: what is measured, with so many calls of each variant back to back, then what is not."""
        scale = self.scale
        figures = measure(build, rounds=scale.rounds, calls=calls, profiled_calls=scale.profiled_calls)
        for name, of_variant in figures.items():
            yield Row(part, name, *cell, columns, of_variant, at_s=self.deadline.passed())
        yield from unmeasured(part, cell, columns, left_out)

    def with_floor(self, row: Row, moved: int) -> Row:
        """The row with the bytes and their floor filled in."""
        return dataclasses.replace(row, bytes=moved, floor_us=floor_us(moved, self.bandwidth))


class Pace:
    """Asks the deadline before each piece of work whether one as long as the longest so far still fits."""

    def __init__(self, deadline: Deadline):
        self._deadline, self._longest, self._before = deadline, 0.0, deadline.left()

    def fits(self) -> bool:
        """Whether there is time for another piece; the one before it ends here."""
        left = self._deadline.left()
        self._longest, self._before = max(self._longest, self._before - left), left
        return left > self._longest


def unmeasured(part: str, cell: Cell, columns: int, reasons: dict[str, str]) -> Iterator[Row]:
    for name, reason in reasons.items():
        yield Row(part, name, *cell, columns, left_out=reason)


def no_time(names: Iterable[str], left_out: dict[str, str]) -> dict[str, str]:
    """Every name with the reason why it is not measured."""
    return {name: left_out.get(name, NO_TIME) for name in names}


def torch_side() -> Any:
    """The module `torch_bridge.bench`, or None where torch is not installed or does not see JAX's device."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torch_bridge") is None:
        return None
    side = importlib.import_module("torch_bridge.bench")
    return side if side.sees_device() else None


def forget(side: Any) -> None:
    """Free what the last cell's variants held."""
    gc.collect()
    if side is not None:
        side.release()


class Bookkeeping:
    """The bookkeeping of one part's cells, which share a pool per framework, and the embedding."""

    def __init__(self, run: Run, cells: Sequence[Cell], *, acceptance: bool):
        self.run, self.acceptance, self.side = run, acceptance, torch_side()
        scale = run.scale
        params = bookkeeping_params(scale, run.seed)
        longest = Cell(max(cell.B for cell in cells), max(cell.context for cell in cells))
        state = filled_state(scale, scale.geometry(longest, scale.bookkeeping_pages))
        self.weights = bookkeeping.weights_of(params, state)
        self.pool = jax.ShapeDtypeStruct(state.pool.shape, state.pool.dtype)
        self.torch_params: Any = None
        self.torch_state: Any = None
        if self.side is not None:
            self.torch_params = self.side.as_shared(params)
            self.torch_state = self.side.torch_state(state)
        self.carried = Carried(state)

    def lowering(self, cell: Cell, backend: str, sets: Sequence[Ready]) -> Callable[[], Any]:
        """Traces the looped bookkeeping of a cell on a backend of JAX."""
        state = dataclasses.replace(self.of_cell(cell), pool=self.pool)
        return functools.partial(
            bookkeeping.lowered, self.run.scale, state.geometry, state, sets, self.weights,
            backend=backend, acceptance=self.acceptance,
        )  # fmt: skip

    def of_cell(self, cell: Cell) -> DecodeState:
        """The carried state with a cell's sizes, every request at its longest."""
        geometry = self.geometry(cell)
        ctx_len = jnp.full(cell.B + 1, geometry.max_ctx, jnp.int32).at[-1].set(0)
        return dataclasses.replace(self.carried.state, ctx_len=ctx_len, geometry=geometry)

    def geometry(self, cell: Cell) -> Geometry:
        return self.run.scale.geometry(cell, self.run.scale.bookkeeping_pages)

    def build(self, cell: Cell, compiled: dict[str, Any], torch_names: Iterable[str], sets: Sequence[Ready]) -> Build:
        """The variants of a cell: torch's, and JAX's by what `compile_all` said."""
        self.carried.state = self.of_cell(cell)
        build: Build = {}
        for name in torch_names:
            build[name] = functools.partial(
                self.side.bookkeeping_variant, name, self.run.scale, self.torch_params,
                self.side.of_cell(self.torch_state, self.carried.state), self.side.as_shared(sets), acceptance=self.acceptance,
            )  # fmt: skip
        for name, executable in compiled.items():
            build[name] = functools.partial(bookkeeping.variant, executable, self.run.scale, self.carried, sets, self.weights)
        return build


def bookkeeping_params(scale: Scale, seed: int) -> DrafterParams:
    """Random weights of what the bookkeeping reads, None for all others: drawing those takes longer than a measurement."""
    shapes = jax.eval_shape(functools.partial(scale.drafter, seed))
    embed_tokens, kv_a_layernorm = (
        jax.random.normal(jax.random.key(seed + number), x.shape, x.dtype)
        for number, x in enumerate((shapes.embed_tokens, shapes.kv_a_layernorm))
    )
    nothing = jax.tree.map(lambda _: None, shapes)
    return dataclasses.replace(nothing, embed_tokens=embed_tokens, kv_a_layernorm=kv_a_layernorm)


def bookkeeping_rows(
    run: Run, cells: Sequence[Cell], *, acceptance: bool = False, compiled_torch: bool = False
) -> Iterator[Row]:
    """Rows of the bookkeeping.

    Args:
        compiled_torch: measure `torch.compile` beside plain XLA and the eager chain, instead of everything else.
    """
    part = "torch.compile" if compiled_torch else "bookkeeping and acceptance" if acceptance else "bookkeeping"
    side = torch_side()
    jax_names = [name for name in BACKENDS if not compiled_torch or name == "jax xla"]
    torch_names = () if side is None else ("torch eager", side.COMPILED) if compiled_torch else side.BOOKKEEPING
    left_out = {name: reason for name in torch_names if (reason := side.unavailable(name))}
    left_out |= {name: reason for name in jax_names if (reason := run.unavailable(BACKENDS[name]))}

    work = Bookkeeping(run, cells, acceptance=acceptance)
    columns = {cell: work.geometry(cell).max_blocks_per_seq for cell in cells}

    def too_late(cell: Cell) -> Iterator[Row]:
        return unmeasured(part, cell, columns[cell], no_time([*torch_names, *jax_names], left_out))

    pace = Pace(run.deadline)
    # a call is hundreds of steps
    calls = max(2, run.scale.calls // 4)
    for number, group in enumerate(itertools.batched(cells, 6)):  # compiled side by side
        if not pace.fits():
            for cell in group:
                yield from too_late(cell)
            continue
        sets = {cell: draw_sets(run, cell, work.geometry(cell)) for cell in group}
        compiled = compile_all(
            {
                (cell, name): work.lowering(cell, BACKENDS[name], sets[cell])
                for cell in group
                for name in jax_names
                if name not in left_out
            }
        )
        run.turn()
        of_jax = {cell: {name: found for (of, name), found in compiled.items() if of == cell} for cell in group}
        alone: dict[Cell, dict[str, float]] = {}
        if run.on_gpu and number == 0:  # behind the first group torch has run
            for cell in group:
                build = work.build(cell, of_jax[cell], (), sets[cell])
                alone[cell] = measure_alone(build, rounds=LOOK_ROUNDS, calls=calls)
        for cell in group:
            if not run.deadline.left():
                yield from too_late(cell)
                continue
            build = work.build(cell, of_jax[cell], [name for name in torch_names if name not in left_out], sets[cell])
            for row in run.measured(part, cell, columns[cell], build, left_out, calls=calls):
                row.figures.alone_us = alone.get(cell, {}).get(row.name)
                yield row
            del build
            forget(side)


def draw_sets(run: Run, cell: Cell, geometry: Geometry) -> list[Ready]:
    """A cell's operands of the bookkeeping."""
    rng = run.rng(cell)
    return [bookkeeping.draw_ready(rng, run.scale, geometry, cell.B) for _ in range(run.scale.sets)]


def step_rows(run: Run) -> Iterator[Row]:
    """Rows of the whole step, in a pool of the cell's own size: every context page is read.

    Each variant is measured as soon as it is there, JAX's ahead of torch's, and again in turn with the others of its cell when
    all are. The other combinations of switches come last.
    """
    scale, side = run.scale, torch_side()
    params = scale.drafter(run.seed)
    torch_params = None if side is None else side.as_shared(params)
    took: dict[str, float] = {}  # seconds, by variant, at the last cell
    of_torch: dict[bool, tuple[str, ...]] = {True: (), False: ()}
    if side is not None:
        of_torch = {True: side.MAIN_STEPS, False: tuple(name for name in side.STEPS if name not in side.MAIN_STEPS)}
    for cell, main in [*((cell, True) for cell in scale.step), *((cell, False) for cell in scale.every_step)]:
        options = whole_step.MAIN if main else whole_step.OTHERS
        left_out = {name: LONG_TO_TRACE for name in options if name in scale.steps_left_out}
        left_out |= {name: reason for name in of_torch[main] if (reason := side.unavailable(name))}
        for name, of_name in options.items():
            for backend in whole_step.backends_of(of_name):
                if reason := run.unavailable(backend):
                    left_out[name] = reason
        geometry = scale.geometry(cell)
        names = [*of_torch[main], *options]
        if run.deadline.left() <= min((took.get(name, 0.0) for name in names if name not in left_out), default=0.0):
            yield from unmeasured("step", cell, geometry.max_blocks_per_seq, no_time(names, left_out))
            continue
        work = StepCell(run, cell, geometry, params, torch_params)
        build = work.build([name for name in names if name not in left_out])
        for row in itertools.chain(work.rows(build, took), unmeasured("step", cell, geometry.max_blocks_per_seq, left_out)):
            yield run.with_floor(row, work.floor_bytes)
        del build, work
        forget(side)


class StepCell:
    """The whole step at one cell: its operands, its variants and their rows."""

    def __init__(self, run: Run, cell: Cell, geometry: Geometry, params: DrafterParams, torch_params: Any):
        self.run, self.cell, self.geometry, self.params, self.torch_params = run, cell, geometry, params, torch_params
        rng = run.rng(cell)
        self.sets = [draw_inputs(rng, run.scale, geometry, cell.B) for _ in range(run.scale.sets)]
        self.carried = Carried(filled_state(run.scale, geometry))
        self.floor_bytes = step_bytes(step_parts.bytes_of(run.scale, geometry, cell.B))

    def build(self, names: Sequence[str]) -> Build:
        """The variants, JAX's first; they are compiled side by side when the first of them is built."""
        options = whole_step.MAIN | whole_step.OTHERS
        torch_names = [name for name in names if name not in options]
        of_torch: Build = {}
        if torch_names:
            side = torch_side()
            state, sets = side.torch_state(self.carried.state), side.as_shared(self.sets)
            for name in torch_names:
                of_torch[name] = functools.partial(side.step_variant, name, self.torch_params, state, sets)
        jax_names = [name for name in names if name in options]
        steps = {name: whole_step.make_step(self.run.scale, self.geometry, options[name]) for name in jax_names}
        traced = trace_all(
            {
                (name, loop): function
                for name, step in steps.items()
                for loop, function in self.lowering(step, options[name]).items()
            }
        )
        with_products = {key: lowered for key, lowered in traced.items() if has_products(lowered)}
        without = compile_all({key: lowered for key, lowered in traced.items() if key not in with_products})
        self.run.turn()

        @functools.cache
        def compiled() -> dict[tuple[str, bool], Any]:
            # XLA chooses among products by their times, which nothing else on the device should disturb
            return without | compile_all(with_products, first_alone=True)

        def variant(name: str) -> Variant:
            of = compiled()
            return whole_step.variant(
                of[name, False], of.get((name, True)), self.loop_steps(options[name]), steps[name], self.params, self.carried,
                self.sets,
            )  # fmt: skip

        return {name: functools.partial(variant, name) for name in jax_names} | of_torch

    def lowering(self, step: DecodeStep, options: StepOptions) -> dict[bool, Callable[[], Any]]:
        """Traces the loop of steps (True), where there is one, and the step (False)."""
        inputs = self.sets[0]

        def loop() -> Any:
            return whole_step.lowered_loop(self.loop_steps(options), options, self.params, self.carried.state, inputs)

        def lower() -> Any:
            return step.lower(self.params, self.carried.state, inputs)

        return {True: loop, False: lower} if self.run.scale.step_loop else {False: lower}

    def loop_steps(self, options: StepOptions) -> int:
        return whole_step.loop_steps(self.run.scale, options, self.geometry)

    def rows(self, build: Build, took: dict[str, float]) -> Iterator[Row]:
        """Each variant as it comes, then all of them in turn. `took` has the seconds that each took at the last cell."""
        scale, figures, variants = self.run.scale, {}, {}

        def row(name: str, **fields: Any) -> Row:
            at_s = self.run.deadline.passed()
            return Row("step", name, *self.cell, self.geometry.max_blocks_per_seq, at_s=at_s, **fields)

        late = False
        for name, function in build.items():
            began = self.run.deadline.passed()
            late |= self.run.deadline.left() <= took.get(name, 0.0)
            if late:  # for the others as well: the first of JAX's has all of them compiled
                yield row(name, left_out=NO_TIME)
                continue
            figures[name] = Figures()
            variant = built(function, figures[name])
            if variant is None:
                yield row(name, figures=figures[name])
                continue
            variants[name] = variant
            in_turn({name: variant}, figures, rounds=LOOK_ROUNDS, calls=scale.step_calls, profiled_calls=0)
            if name in whole_step.MAIN or name in whole_step.OTHERS:  # torch's are built behind them
                figures[name].alone_us = figures[name].device_us
            took[name] = self.run.deadline.passed() - began
            first = dataclasses.replace(figures[name])
            first.add_note(FIRST_LOOK)
            yield row(name, figures=first)
        variants = {name: variant for name, variant in variants.items() if not figures[name].error}
        if not self.run.deadline.left():  # the first looks stand
            return
        in_turn(variants, figures, rounds=scale.rounds, calls=scale.step_calls, profiled_calls=scale.profiled_calls)
        for name in variants:
            yield row(name, figures=figures[name])


def has_products(lowered: Any) -> bool:
    """Whether a function that `trace_all` has traced has matrix products that XLA computes."""
    return not isinstance(lowered, Exception) and "stablehlo.dot_general" in lowered.as_text()


def part_rows(run: Run) -> Iterator[Row]:
    """Rows of each part of the step; on a GPU from a profile, with the cache flushed before every call."""
    if not run.scale.parts:
        yield Row("part", "all", *NO_CELL, 0, left_out=FULL_RUN)
        return
    scale = run.scale
    params = scale.drafter(run.seed)
    flush = cache_flush(FLUSHED_BYTES) if run.on_gpu else None
    names = {f"{part}, {backend}": (part, backend) for part in PART_OPS for backend in part_backends(part)}
    left_out = {name: reason for name, (_, backend) in names.items() if (reason := run.unavailable(backend))}
    pace = Pace(run.deadline)
    for cell in scale.parts:
        geometry = scale.geometry(cell)
        columns = geometry.max_blocks_per_seq
        moved = step_parts.bytes_of(scale, geometry, cell.B)
        if not pace.fits():
            yield from unmeasured("part", cell, columns, no_time(names, left_out))
            continue
        shapes = kernel_shapes(params, scale.config, geometry, cell.B)
        not_run = left_out | {
            name: reason
            for name, (part, backend) in names.items()
            if name not in left_out and (reason := why_no_part(part, backend, shapes))
        }
        rng, state = run.rng(cell), filled_state(scale, geometry)
        work = PartRun([step_parts.draw_part_operands(rng, scale, geometry, cell.B, params, state) for _ in range(scale.sets)])
        del state
        traced = trace_all(
            {
                name: functools.partial(work.lower, part, step_parts.part_function(part, scale, geometry, backend))
                for name, (part, backend) in names.items()
                if name not in not_run
            }
        )
        run.turn()
        if not run.deadline.left():
            yield from unmeasured("part", cell, columns, no_time(names, not_run))
            continue
        compiled = compile_all(traced, workers=1)
        build: Build = {name: functools.partial(work.variant, of, flush) for name, of in compiled.items()}
        for row in run.measured("part", cell, columns, build, not_run, calls=scale.calls):
            if flush is not None:  # the host's clock saw the flush, too
                row.figures.wall_us = row.figures.dispatch_us = None
            yield run.with_floor(row, moved[names[row.name][0]].total)
        del work, compiled, build
        forget(None)


def compiled_rows(run: Run) -> Iterator[Row]:
    """Rows of `torch.compile`, on a GPU only: nothing about it would carry over from a CPU."""
    if not run.scale.compiled:
        yield Row("torch.compile", "all", *NO_CELL, 0, left_out=FULL_RUN + ", on a GPU")
        return
    yield from bookkeeping_rows(run, run.scale.compiled, compiled_torch=True)


PARTS: dict[str, tuple[float, Callable[[Run], Iterator[Row]]]] = {
    "bookkeeping": (0.24, lambda run: bookkeeping_rows(run, run.scale.bookkeeping)),
    "step": (0.40, step_rows),
    "parts": (0.20, part_rows),
    "acceptance": (0.06, lambda run: bookkeeping_rows(run, run.scale.acceptance, acceptance=True)),
    "compile": (0.10, compiled_rows),
}
"""By the name that `--parts` takes: its share of the time limit on a CPU, and its rows. In the order in which they run."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Cells of one part that are prepared and measured together."""

    part: str
    scale: Scale
    """With these cells only."""
    cell: Cell
    """The first of them, or `NO_CELL`."""

    @property
    def empty(self) -> bool:
        """Whether there is no cell, and all that the job has to say is why."""
        return self.cell == NO_CELL


def jobs_of(scale: Scale, chosen: Sequence[str]) -> list[Job]:
    """The chosen parts in pieces that can be prepared side by side, in the order in which they run."""
    batch_sizes = dict.fromkeys(cell.B for cell in scale.bookkeeping)
    pieces: dict[str, list[dict[str, tuple[Cell, ...]]]] = {
        "bookkeeping": [{"bookkeeping": tuple(cell for cell in scale.bookkeeping if cell.B == B)} for B in batch_sizes],
        "step": [
            *({"step": (cell,), "every_step": ()} for cell in scale.step),
            *({"step": (), "every_step": (cell,)} for cell in scale.every_step),
        ],
        "parts": [{"parts": (cell,)} for cell in scale.parts] or [{"parts": ()}],
        "acceptance": [{"acceptance": scale.acceptance}],
        "compile": [{"compiled": (cell,)} for cell in scale.compiled] or [{"compiled": ()}],
    }
    return [
        Job(part, dataclasses.replace(scale, **cells), next(itertools.chain(*cells.values()), NO_CELL))  # type: ignore[arg-type]
        for part in PARTS
        if part in chosen
        for cells in pieces[part]
    ]


def guarded(run: Run, part: str, cell: Cell = NO_CELL) -> Iterator[Row]:
    """The rows of one part, or of a job of it that begins with this cell; if it raises, the last row says so."""
    try:
        yield from PARTS[part][1](run)
    except Exception as error:
        yield Row(part, "all", *cell, 0, Figures(error=describe(error)))
