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


OP_BY_OP = "WARNING: CommandBuffer disabled"
"""What XLA calls the span in which it runs a command buffer's kernels one by one, as it does while a profiler listens, unless
`XLA_FLAGS` has `--xla_enable_command_buffers_during_profiling=true`."""

COMMAND_BUFFER = "command_buffer::execute"
GRAPH_LAUNCH = "cuGraphLaunch"
LAUNCHES = ("cuLaunch", "cuMemcpy", "cuMemset")
"""Driver calls that start one thing on the device."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the device did between two markers."""

    events: list[DeviceEvent]
    graphs: int
    """CUDA graphs that the host launched, or command buffers that XLA ran kernel by kernel instead because of the profiler."""
    loose: int | None
    """Events that belong to no graph; None if the trace does not tell."""

    def kernel_us(self, calls: int) -> float:
        """Microseconds of kernels and copies per call, the gaps between them not counted."""
        return sum(event.duration_ns for event in self.events) / calls / 1e3

    def launches(self, calls: int) -> float:
        """Kernels and copies per call."""
        return len(self.events) / calls

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
        loose = None if self.loose is None else max(0, self.loose - skip * calls)  # it is not part of a graph
        return dataclasses.replace(self, events=kept, loose=loose)


def marker(x: jax.Array) -> jax.Array:
    """A kernel that is easy to find in a profile: it separates the timed segments."""
    return jnp.sort(x)


class _HostCall(NamedTuple):
    start_ns: float
    end_ns: float
    name: str


def segments_of(profile: ProfileData) -> list[Segment]:
    """The device's events between the markers of a trace, and behind the last; what is ahead of the first is left out."""
    events: list[DeviceEvent] = []
    host: set[_HostCall] = set()
    tells_graphs = False
    wanted = (OP_BY_OP, COMMAND_BUFFER, GRAPH_LAUNCH, *LAUNCHES)
    for plane in profile.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if not on_device:
                of_line = (event for event in line.events if event.name.startswith(wanted))
                host |= {_HostCall(call.start_ns, call.start_ns + call.duration_ns, call.name) for call in of_line}
            elif line.name.startswith("Stream"):
                for event in line.events:
                    graph = next((value for name, value in event.stats if name and "graph_id" in name), None)
                    tells_graphs |= graph is not None
                    events.append(DeviceEvent(event.start_ns, event.duration_ns, event.name, graph not in (None, 0, "0")))
    events.sort()
    # by its whole name: attention in torch may sort, too
    of_marker = next((event.name for event in events if "sort" in event.name), None)
    starts = [index for index, event in enumerate(events) if event.name == of_marker]
    segments = []
    for start, end in zip(starts, [*starts[1:], len(events)]):
        # every segment is waited for, so the host's calls lie between the two markers as well
        until = events[end].start_ns if end < len(events) else float("inf")
        calls = [call for call in host if events[start].start_ns <= call.start_ns < until]
        of_segment = events[start + 1 : end]
        graphs, loose = _graphs_and_loose(of_segment, calls, tells_graphs)
        segments.append(Segment(of_segment, graphs, loose))
    return segments


def _graphs_and_loose(events: list[DeviceEvent], calls: list[_HostCall], tells_graphs: bool) -> tuple[int, int | None]:
    """The two counts of a segment. A command buffer that is launched shows up as XLA's span and as the driver's call."""
    op_by_op = [call for call in calls if call.name.startswith(OP_BY_OP)]
    buffers = sum(call.name.startswith(COMMAND_BUFFER) for call in calls)
    graphs = max(buffers + len(op_by_op), sum(call.name.startswith(GRAPH_LAUNCH) for call in calls))
    if tells_graphs and not op_by_op:
        return graphs, sum(not event.in_graph for event in events)
    if not graphs:
        return graphs, len(events)
    launches = [call.start_ns for call in calls if call.name.startswith(LAUNCHES)]
    inside = sum(any(span.start_ns <= time <= span.end_ns for span in op_by_op) for time in launches)
    return graphs, max(0, len(events) - inside) if inside else None


def profile_calls(runs: Sequence[Callable[[], Any]], calls: int, wait: Callable[[Any], Any]) -> list[Segment]:
    """One segment per function, each called `calls` times and then waited for, from one trace.

    Args:
        runs: compiled and warmed up; none may launch XLA's kernel for a sort, which may have the marker's name.
        wait: blocks until the device has done what a function's last result stands for.

    Raises:
        RuntimeError: the trace does not have one segment per function.
    """
    boundary = jax.jit(marker, donate_argnums=0)  # donated: a copy before the sort would count as the last segment's
    number = jax.block_until_ready(boundary(jnp.arange(7)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
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
