"""Reading device time and launches out of a `jax.profiler` trace.

The trace has every kernel and copy on the GPU's streams, torch's as well, so one reader serves both frameworks.
"""

from __future__ import annotations

import dataclasses
import glob
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData


class DeviceEvent(NamedTuple):
    """One kernel or copy on a stream."""

    start_ns: float
    duration_ns: float
    name: str
    in_graph: bool
    """Whether it was launched as part of a CUDA graph (an XLA command buffer is one)."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the device did between two markers: `calls` equal calls of one function."""

    events: list[DeviceEvent]
    graph_launches: int
    """CUDA graphs that the host launched."""
    tells_graphs: bool
    """Whether the trace says which events belong to a graph."""

    def kernel_us(self, calls: int) -> float:
        """Microseconds of kernels and copies per call, the gaps between them not counted."""
        return sum(event.duration_ns for event in self.events) / calls / 1e3

    def launches(self, calls: int) -> float:
        """Kernels and copies per call."""
        return len(self.events) / calls

    def loose_launches(self, calls: int) -> float | None:
        """Kernels and copies per call outside of CUDA graphs; None if the trace does not tell."""
        if self.graph_launches and not self.tells_graphs:
            return None
        return sum(not event.in_graph for event in self.events) / calls

    def span_us(self, calls: int, *, skip: int = 0) -> float | None:
        """Median over the calls of the time from a call's first kernel to the end of its last, gaps included.

        `skip` kernels at the head of every call are left out. None if the events do not divide into equal calls.
        """
        size, rest = divmod(len(self.events), calls)
        if rest or size <= skip:
            return None
        spans = []
        for first in range(skip, len(self.events), size):
            of_call = self.events[first : first + size - skip]
            spans.append(max(event.start_ns + event.duration_ns for event in of_call) - of_call[0].start_ns)
        return statistics.median(spans) / 1e3

    def without_head(self, calls: int, skip: int) -> Segment:
        """The segment without the first `skip` events of each call; nothing is left if the calls are not equal."""
        if not skip:
            return self
        size, rest = divmod(len(self.events), calls)
        kept = [] if rest else [event for index, event in enumerate(self.events) if index % size >= skip]
        return dataclasses.replace(self, events=kept)


def marker(x: jax.Array) -> jax.Array:
    """A kernel that is easy to find in a profile: it separates the timed segments."""
    return jnp.sort(x)


def segments_of(profile: ProfileData) -> list[Segment]:
    """The device's events between the markers of a trace, and behind the last; what is ahead of the first is left out."""
    events: list[DeviceEvent] = []
    graph_launches: list[float] = []
    tells_graphs = False
    for plane in profile.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if not on_device:
                    if event.name.startswith("cuGraphLaunch"):  # of the driver: torch's runtime calls it, too
                        graph_launches.append(event.start_ns)
                    continue
                graph = next((value for name, value in event.stats if name and "graph_id" in name), None)
                tells_graphs |= graph is not None
                events.append(DeviceEvent(event.start_ns, event.duration_ns, event.name, graph not in (None, 0, "0")))
    events.sort()
    starts = [index for index, event in enumerate(events) if "sort" in event.name]
    segments = []
    for start, end in zip(starts, [*starts[1:], len(events)]):
        # every segment is waited for, so the host's launches lie between the two markers as well
        until = events[end].start_ns if end < len(events) else float("inf")
        launched = len({time for time in graph_launches if events[start].start_ns <= time < until})
        segments.append(Segment(events[start + 1 : end], launched, tells_graphs))
    return segments


def profile_calls(runs: Sequence[Callable[[], Any]], calls: int, wait: Callable[[Any], Any]) -> list[Segment]:
    """One segment per function, each called `calls` times and then waited for, from one trace.

    Args:
        runs: compiled and warmed up; none may launch a kernel with `sort` in its name.
        wait: blocks until the device has done what a function's last result stands for.

    Raises:
        RuntimeError: the trace does not have one segment per function.
    """
    boundary = jax.jit(marker, donate_argnums=0)  # donated: a copy before the sort would count as the last segment's
    number = jax.block_until_ready(boundary(jnp.arange(7)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for run in runs:
                number = jax.block_until_ready(boundary(number))
                result = None
                for _ in range(calls):
                    result = run()
                wait(result)
        (trace,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        segments = segments_of(ProfileData.from_file(trace))
    if len(segments) != len(runs):
        raise RuntimeError(f"the trace has {len(segments)} marked segments, expected {len(runs)}")
    return segments


def kernel_times(runs: Sequence[Callable[[], Any]], repeat: int) -> list[tuple[float, float]]:
    """(microseconds of kernels, launches) per call of each function, from one trace of the GPU's streams."""
    segments = profile_calls(runs, repeat, jax.block_until_ready)
    return [(segment.kernel_us(repeat), segment.launches(repeat)) for segment in segments]
