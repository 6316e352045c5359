"""`python -m jdspark.bench.overlap`: what `overlap_context_projection` gives on this GPU, in JAX and in torch.

For each batch size, at one tensor-parallel rank of Kimi K3 with the logits of its whole vocabulary: the step time with the
switch off and on, in turn, and from a profile the microseconds for which the acceptance's kernels ran beside any other kernel.
JAX runs loops of steps, each one dispatch, torch replays a CUDA graph; both by the host's clock over many steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import ops
from ..config import StepOptions
from ..paths import overlap_mechanism, step_paths
from ..step import StepInputs
from .bookkeeping import Carried
from .clock import Variant, compile_all, or_raise, repeat, seconds_of
from .parts import torch_side
from .profile import DeviceEvent, profile_calls
from .scale import FULL, Cell, Scale, draw_inputs, filled_state
from .whole_step import lowered_loop, run_loop

TARGET_VOCAB, CONTEXT = 163840, 2048

STEPS = 25
"""In one dispatch."""

SWITCH = {on: StepOptions(fused_prologue=True, overlap_context_projection=on) for on in (False, True)}
IN_TORCH = {False: "torch fused", True: "torch fused, overlap"}


@dataclasses.dataclass
class Row:
    """One framework at one batch size; microseconds per step."""

    framework: str
    B: int
    off_us: list[float]
    """Of every round."""
    on_us: list[float]
    acceptance_us: float
    """Of the acceptance's kernels, switch on."""
    beside_off_us: float
    """How long the acceptance ran beside other kernels, see `time_beside`."""
    beside_on_us: float
    partners: dict[str, float]
    """What ran beside it, switch on: kernels and microseconds, the longest first."""

    def __str__(self) -> str:
        saved = [off - on for off, on in zip(self.off_us, self.on_us, strict=True)]
        partners = ", ".join(f"{name} {us:.1f}" for name, us in self.partners.items())
        return (
            f"{self.framework} B={self.B}: off {spread(self.off_us)} us, on {spread(self.on_us)} us, saved {spread(saved)} us;"
            f" acceptance {self.acceptance_us:.1f} us, of it beside others: off {self.beside_off_us:.1f} us, on"
            f" {self.beside_on_us:.1f} us ({partners or 'none'})"
        )


def spread(values: Sequence[float]) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def time_beside(events: Sequence[DeviceEvent], names: Collection[str]) -> tuple[float, dict[str, float]]:
    """For how many nanoseconds kernels of these names ran at the same time as any other; and as each other, by its name."""
    total, partners = 0.0, dict[str, float]()
    for event in (event for event in events if event.name in names):
        counted = event.start_ns
        for other in (other for other in events if other.name not in names):  # in the order of their starts
            start = max(event.start_ns, other.start_ns)
            end = min(event.start_ns + event.duration_ns, other.start_ns + other.duration_ns)
            if start < end:
                partners[other.name] = partners.get(other.name, 0) + end - start
                total += max(0, end - max(start, counted))
                counted = max(counted, end)
    return total, partners


def row_of(
    framework: str, B: int, run: Mapping[bool, Callable[[], Any]], accept: Callable[[], Any], *, rounds: int, steps: int
) -> Row:
    """Time and profile one framework's steps.

    Args:
        run: `steps` steps with the switch off and on, waited for.
        accept: the acceptance alone, waited for: what its kernels are called.
    """
    times: dict[bool, list[float]] = {on: [] for on in run}
    for _ in range(rounds):
        for on, function in run.items():
            function()  # the one before was the other executable's, whose command buffer is not this one's
            times[on].append(seconds_of(function) / steps * 1e6)
    alone, *segments = profile_calls([accept, *run.values()], 1, lambda _: None)
    names = {event.name for event in alone.events}
    events = {on: segment.events for on, segment in zip(run, segments, strict=True)}
    beside = {on: time_beside(events[on], names) for on in run}
    longest = sorted(beside[True][1].items(), key=lambda item: -item[1])[:3]
    return Row(
        framework, B, times[False], times[True],
        acceptance_us=sum(event.duration_ns for event in events[True] if event.name in names) / steps / 1e3,
        beside_off_us=beside[False][0] / steps / 1e3,
        beside_on_us=beside[True][0] / steps / 1e3,
        partners={name: ns / steps / 1e3 for name, ns in longest},
    )  # fmt: skip


def measured(scale: Scale, batches: Sequence[int], *, seed: int, rounds: int) -> Iterator[Row]:
    """Rows of every batch size: JAX's and, where torch is there, torch's."""
    params, side = scale.drafter(seed), torch_side()
    carried: dict[int, Carried] = {}
    inputs: dict[int, StepInputs] = {}
    lower: dict[tuple[int, bool], Callable[[], Any]] = {}
    for B in batches:
        geometry = scale.geometry(Cell(B, CONTEXT))
        carried[B] = Carried(filled_state(scale, geometry))
        inputs[B] = draw_inputs(np.random.default_rng(seed), scale, geometry, B)
        for on, options in SWITCH.items():
            lower[B, on] = functools.partial(lowered_loop, STEPS, options, params, carried[B].state, inputs[B])
    compiled = compile_all(lower, first_alone=True)
    for B in batches:
        run = {on: functools.partial(run_loop, or_raise(compiled[B, on]), params, carried[B], [inputs[B]]) for on in SWITCH}
        for function in run.values():
            function()
        accept = functools.partial(ops.accept_strict, backend=step_paths(params, SWITCH[True], B)["accept_strict"].backend)
        alone = Variant(functools.partial(jax.jit(accept), inputs[B].logits, inputs[B].draft_tokens))
        repeat(alone, 1)
        yield row_of("jax", B, run, functools.partial(repeat, alone, 1), rounds=rounds, steps=STEPS)
        if side is not None:
            weights, state, sets = side.as_shared(params), side.torch_state(carried[B].state), side.as_shared([inputs[B]])
            graphs = {on: side.step_variant(name, weights, state, sets) for on, name in IN_TORCH.items()}
            run = {on: functools.partial(repeat, graph, STEPS) for on, graph in graphs.items()}
            alone = side.accept_variant(sets[0])
            yield row_of("torch graph", B, run, functools.partial(repeat, alone, 1), rounds=rounds, steps=STEPS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jdspark.bench.overlap", description="Times and profiles the second switch."
    )
    parser.add_argument("--batches", default="1,4,16", help="batch sizes, with commas")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each variant, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure")
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    # else a profile shows a step's kernels one by one, and none beside another
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_enable_command_buffers_during_profiling=true"
    if jax.default_backend() != "gpu":
        print(f"jdspark.bench.overlap: JAX runs on {jax.default_backend()}; a GPU's kernels are what overlaps", file=sys.stderr)
        return 2
    print(f"{jax.devices()[0].device_kind}, in JAX: {overlap_mechanism()}", flush=True)
    rows = []
    scale, batches = dataclasses.replace(FULL, vocab=TARGET_VOCAB), [int(B) for B in args.batches.split(",")]
    for row in measured(scale, batches, seed=args.seed, rounds=args.rounds):
        rows.append(row)
        print(row, flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
