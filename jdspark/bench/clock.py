"""Timing: variants of one computation in turn, by the host's clock, by device events and by a profile."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from .profile import profile_calls


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of computing something, compiled and warmed up."""

    run: Callable[[], Any]
    """Dispatches one call on the next operands in turn; does not wait for the device."""
    wait: Callable[[Any], Any] = jax.block_until_ready
    """Waits for what `run` returned and everything before it."""
    steps: int = 1
    """Decode steps per call."""
    one_dispatch: bool = False
    """A call is a single dispatch of many steps, so that the host's clock over the steps is device time, gaps included."""
    device_seconds: Callable[[int], float] | None = None
    """Seconds of device time that this many calls take."""
    device_clock: str = ""
    """How `device_seconds` knows: `events` or `loop`, see `Figures`."""
    skip: int = 0
    """Kernels at the head of every call that do not belong to it (a flush of the cache)."""
    note: str = ""


@dataclasses.dataclass
class Figures:
    """Medians per decode step, in microseconds; None where nothing could say."""

    wall_us: float | None = None
    """Host clock, calls back to back, from the first dispatch to the last result."""
    dispatch_us: float | None = None
    """Host clock per call of a few back to back behind an idle device, too few for its queue to fill, until they have returned:
    where it is below `device_us`, `wall_us` does not wait for the host. None where a call is many steps."""
    device_us: float | None = None
    """Device time, launch gaps inside a step included; `device_clock` says how it was taken."""
    device_clock: str = ""
    """`events` (CUDA events around replays of a graph), `loop` (host clock over one dispatch of a jitted loop of many steps; of
    the whole step over two, see `whole_step.loop_seconds`), `profile` (from the first kernel's start to the last one's end, in
    a profile, which runs no command buffers)."""
    alone_us: float | None = None
    """Of JAX's variants, device time by the same clock before anything of torch's had run in the process: once it has, launches
    inside of CUDA graphs may take longer, JAX's as well, which a caller without torch does not see."""
    kernel_us: float | None = None
    """Kernels and copies alone, from a profile."""
    launches: float | None = None
    """Kernels and copies per step."""
    graph_launches: float | None = None
    """CUDA graphs (XLA: command buffers) that the host launches per step, from the same profile."""
    loose_launches: float | None = None
    """Kernels and copies per step that are not part of one; None if the profile does not tell."""
    build_s: float | None = None
    """Seconds that its capture and first call took, torch.compile's compilation as well; what JAX compiled ahead, beside the
    other variants of its cell, is not in it."""
    error: str = ""
    note: str = ""

    def add_note(self, note: str) -> None:
        """Beside the one that is there."""
        self.note = "; ".join(filter(None, [self.note, note]))

    @property
    def failed(self) -> bool:
        """Whether something of it broke: a variant, or the profile of its cell, without which its times by the clock stand."""
        return bool(self.error) or NO_PROFILE in self.note


LEAST_CALLS, ROUND_SECONDS = 8, 0.1
"""Of a variant in a round, back to back: those that take so long, and no fewer than these."""

NO_PROFILE = "no profile: "


class Deadline:
    """A time limit that is asked before each piece of work."""

    def __init__(self, seconds: float):
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """Begin again, with another limit."""
        self._began = time.monotonic()
        self._ends = self._began + seconds

    def passed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def left(self) -> float:
        """Seconds until it ends, at least 0."""
        return max(0.0, self._ends - time.monotonic())


def describe(error: BaseException) -> str:
    """One line for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def seconds_of(call: Callable[[], Any]) -> float:
    """Host seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def dispatch_seconds(variant: Variant, calls: int) -> float:
    """Host seconds of each of so many calls back to back, until they have returned; then waits for what they began."""
    started = time.perf_counter()
    result = dispatch(variant, calls)
    seconds = time.perf_counter() - started
    variant.wait(result)
    return seconds / calls


def seconds_per_call(few: int, of_few: float, many: int, of_many: float) -> float:
    """Seconds of a call by what so many in a row take longer than so few: what a row has besides, at its ends, is not in it.

    On a busy CPU the difference of two short rows may be anything; where the longer one took less, its calls are what there is.
    """
    return (of_many - of_few) / (many - few) if of_many > of_few else of_many / many


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median host seconds of several calls."""
    return statistics.median(seconds_of(call) for _ in range(rounds))


def trace_all[Key](lower: dict[Key, Callable[[], Any]]) -> dict[Key, Any]:
    """Trace each function now, for `compile_all` later; the exception stands in the place of one that failed."""
    traced: dict[Key, Any] = {}
    for key, function in lower.items():
        try:
            traced[key] = function()
        except Exception as error:
            traced[key] = error
    return traced


def compile_all[Key](lower: dict[Key, Any], workers: int = 12, *, first_alone: bool = False) -> dict[Key, Any]:
    """Trace each function in turn, compile them side by side; the exception stands in the place of one that failed.

    Args:
        lower: functions, or what `trace_all` made of them.
        first_alone: no other compilation begins before the first one ends: XLA times products on the device to choose among
            them, and the others find its choices.
    """

    def compiled(lowered: Any, after: Future[Any] | None) -> Any:
        try:
            if after is not None:
                after.result()
            return lowered.compile()
        except Exception as error:
            return error

    results: dict[Key, Any] = {}
    first: Future[Any] | None = None
    with ThreadPoolExecutor(workers) as pool:
        for key, function in lower.items():
            try:
                lowered = function() if callable(function) else or_raise(function)
                results[key] = pool.submit(compiled, lowered, first)
                first = results[key] if first_alone and first is None else first
            except Exception as error:
                results[key] = error
        return {key: result if isinstance(result, Exception) else result.result() for key, result in results.items()}


def or_raise[Of](found: Of | Exception) -> Of:
    """What tracing or compiling gave; raises the exception that stands in its place."""
    if isinstance(found, Exception):
        raise found
    return found


def built(function: Callable[[], Variant], figures: Figures) -> Variant | None:
    """Build a variant and call it once; its build time, note or error go into the figures."""
    started = time.perf_counter()
    with _noting(figures):
        variant = function()
        variant.wait(variant.run())
        figures.note, figures.build_s = variant.note, time.perf_counter() - started
        return variant
    return None


def in_turn(variants: dict[str, Variant], figures: dict[str, Figures], *, rounds: int, calls: int, profiled_calls: int) -> None:
    """Run built variants in turn for several rounds, then once more under the profiler, and fill in their figures.

    A variant that raises gets the message in its figures and stops no other.

    Args:
        calls: of each variant in each round, back to back, fewer of a slow one: what these and one take longer than one.
        profiled_calls: of each variant under the profiler; 0 leaves the profile out, as on a CPU, where there is none.
    """
    wall: dict[str, list[float]] = {name: [] for name in variants}
    device: dict[str, list[float]] = {name: [] for name in variants}
    dispatched: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            if figures[name].error:
                continue
            with _noting(figures[name]):
                repeat(variant, 1)  # the calls before were another variant's, which are not what a caller's next one follows
                if variant.steps == 1:
                    dispatched[name].append(dispatch_seconds(variant, LEAST_CALLS))
                once = seconds_of(functools.partial(repeat, variant, 1))
                some = min(calls, max(LEAST_CALLS, int(ROUND_SECONDS / max(once, 1e-6))))
                several = seconds_of(functools.partial(repeat, variant, 1 + some))
                wall[name].append(seconds_per_call(1, once, 1 + some, several) / variant.steps)
                if variant.device_seconds is not None:
                    device[name].append(variant.device_seconds(some) / some / variant.steps)
    for name, variant in variants.items():
        of_variant = figures[name]
        if of_variant.error:
            continue
        of_variant.wall_us = statistics.median(wall[name]) * 1e6
        if dispatched[name]:
            of_variant.dispatch_us = statistics.median(dispatched[name]) * 1e6
        if device[name]:
            of_variant.device_us, of_variant.device_clock = statistics.median(device[name]) * 1e6, variant.device_clock
        elif profiled_calls and variant.one_dispatch:
            of_variant.device_us, of_variant.device_clock = of_variant.wall_us, "loop"
    sound = {name: variant for name, variant in variants.items() if not figures[name].error}
    if profiled_calls and sound:
        try:
            _profile(sound, figures, profiled_calls)
        except Exception as error:  # the times by the clock stand without it
            for name in sound:
                figures[name].add_note(NO_PROFILE + describe(error))


def measure(build: dict[str, Callable[[], Variant]], *, rounds: int, calls: int, profiled_calls: int) -> dict[str, Figures]:
    """Build all variants, then `in_turn`."""
    figures = {name: Figures() for name in build}
    variants = {name: variant for name, function in build.items() if (variant := built(function, figures[name])) is not None}
    in_turn(variants, figures, rounds=rounds, calls=calls, profiled_calls=profiled_calls)
    return figures


def measure_alone(build: dict[str, Callable[[], Variant]], *, rounds: int, calls: int) -> dict[str, float]:
    """Microseconds per step of variants whose calls are single dispatches, one after the other: for `Figures.alone_us`."""
    found = {}
    for name, function in build.items():
        of_variant = measure({name: function}, rounds=rounds, calls=calls, profiled_calls=0)[name]
        if of_variant.wall_us is not None:
            found[name] = of_variant.wall_us
    return found


def dispatch(variant: Variant, calls: int) -> Any:
    """That many calls back to back, not waited for: what the last one returned."""
    result = None
    for _ in range(calls):
        result = variant.run()
    return result


def repeat(variant: Variant, calls: int) -> None:
    """That many calls back to back, waited for."""
    variant.wait(dispatch(variant, calls))


def _profile(variants: dict[str, Variant], figures: dict[str, Figures], calls: int) -> None:
    """Add what a profile of the variants says to their figures."""
    # a single call of many steps says it all
    calls_of = {name: max(1, calls // variant.steps) for name, variant in variants.items()}
    runs = [functools.partial(repeat, variant, calls_of[name]) for name, variant in variants.items()]
    for (name, variant), whole in zip(variants.items(), profile_calls(runs, 1, lambda _: None), strict=True):
        calls = calls_of[name]
        of_variant, steps = figures[name], calls * variant.steps
        if not whole.events:
            of_variant.add_note("the profile has nothing of it")
            continue
        segment = whole.without_head(calls, variant.skip)
        of_variant.kernel_us = segment.kernel_us(steps)
        of_variant.launches = segment.launches(steps)
        of_variant.graph_launches = segment.graphs / steps
        of_variant.loose_launches = None if segment.loose is None else segment.loose / steps
        span = whole.span_us(calls, skip=variant.skip)
        if of_variant.device_us is None and span is not None:
            of_variant.device_us, of_variant.device_clock = span / variant.steps, "profile"


class _noting:
    """Keeps an exception of its block as the error of some figures."""

    def __init__(self, figures: Figures):
        self._figures = figures

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._figures.error = describe(error)
            return True
        return False
