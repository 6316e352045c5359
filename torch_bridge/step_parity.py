"""`python -m torch_bridge.parity --whole-step`: the jitted step against its torch twin, over switches, layouts and batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jdspark.config import DrafterConfig, Geometry, StepOptions
from jdspark.ops.backends import Backend, why_unavailable
from jdspark.ops.checks import Layout
from jdspark.params import DrafterParams
from jdspark.presets import K3_RANK, TINY, k3_rank_drafter, random_drafter

from .parity import Row
from .whole_step import compare_step_bits, compare_steps

LAYOUTS: tuple[Layout, ...] = ("layer_major", "page_major")
SWITCHES = ((False, False), (False, True), (True, False), (True, True))
"""(fused_prologue, overlap_context_projection)"""

PROMPTS = {1: ((61,), 0), 4: ((61, 5, 30), 1)}
"""Batch size -> prompt lengths of its gen requests, and dummy rows."""

SMALL = Geometry(
    max_batch=6, max_draft_len=7, page_size=8, num_pages=120, max_blocks_per_seq=28, max_ctx=200, offset_divisor=10
)
K3 = Geometry(max_batch=6, max_draft_len=7, page_size=32, num_pages=160, max_blocks_per_seq=36, max_ctx=1024, offset_divisor=10)


@dataclasses.dataclass
class StepParity:
    """One run of compared steps."""

    layout: Layout
    B: int
    fused_prologue: bool
    overlap_context_projection: bool
    steps: int
    exact_rows: list[Row]
    """Bitwise, by output."""
    bounded_rows: list[Row]
    """Only where no GPU gives both sides one arithmetic."""
    fast: dict[str, dict[str, tuple[int, int]]]
    """By backend of a fast step and output: values that differ, of how many."""
    accepted: list[list[int]]

    @property
    def agreed(self) -> bool:
        rows = [*self.exact_rows, *self.bounded_rows]
        return bool(rows) and all(row.passed == row.cases > 0 for row in rows)


def run_step_parity(
    device: str,
    steps: int,
    seed: int = 0,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    batches: Sequence[int] = tuple(PROMPTS),
    switches: Sequence[tuple[bool, bool]] = SWITCHES,
) -> Iterator[StepParity]:
    """Every combination, one after the other.

    On `"cuda"`: one rank of Kimi K3, every floating-point op of both sides from the Triton source, the exact ops on Pallas
    where it runs; everything bitwise, against the eager twin and its CUDA graph. With both switches on also two fast steps,
    everything on Pallas (products and attention, too) and everything on XLA (cuBLAS' products), whose differences are counted.

    On `"cpu"`: a tiny fp32 drafter; the exact part bitwise, given one side's floating-point results, and those bounded.
    """
    config, params, geometry = (TINY, random_drafter(TINY, seed, dtype="float32"), SMALL) if device == "cpu" else _k3(seed)
    for layout, B, (fused, overlap) in itertools.product(layouts, batches, switches):
        prompt_lens, dummy_rows = PROMPTS[B]
        on: dict[str, Any] = {"fused_prologue": fused, "overlap_context_projection": overlap}
        run: dict[str, Any] = {
            "num_steps": steps,
            "prompt_lens": prompt_lens,
            "dummy_rows": dummy_rows,
            "context_steps": {1, steps // 2},
            "seed": seed,
        }
        of_layout = dataclasses.replace(geometry, layout=layout)
        combination = (layout, B, fused, overlap, steps)
        if device == "cpu":
            bounded = compare_steps(config, params, of_layout, options=StepOptions(**on), **run)
            yield StepParity(*combination, bounded.exact_rows, bounded.bounded_rows, {}, bounded.accepted)
        else:
            backend: Any = "triton" if why_unavailable("pallas") else "pallas"
            options = StepOptions(backend=backend, float_backend="triton", **on)
            others: list[Backend] = ["xla"] if backend == "triton" else ["pallas", "xla"]
            fast = {str(name): StepOptions(backend=name, **on) for name in others if fused and overlap}
            bits = compare_step_bits(config, params, of_layout, options=options, fast_options=fast, **run)
            yield StepParity(*combination, bits.rows, [], bits.fast, bits.accepted)


def _k3(seed: int) -> tuple[DrafterConfig, DrafterParams, Geometry]:
    return K3_RANK, k3_rank_drafter(seed), K3


def print_step_report(console: Console, runs: Sequence[StepParity]) -> None:
    """Print a line per combination, what differed, the counts of the fast steps, and the last line."""
    table = Table(
        "layout", "B", "fused", "overlap", "steps", "bit-identical", "bounded", "worst", title="whole step, jax / torch"
    )
    for run in runs:
        exact = f"{sum(row.passed for row in run.exact_rows)}/{sum(row.cases for row in run.exact_rows)}"
        bounded = f"{sum(row.passed for row in run.bounded_rows)}/{sum(row.cases for row in run.bounded_rows)}"
        worst = max((row.worst / (row.bound or 1) for row in run.bounded_rows), default=0.0)
        table.add_row(
            run.layout, str(run.B), _on(run.fused_prologue), _on(run.overlap_context_projection), str(run.steps),
            exact if run.agreed else f"[red]{exact}[/red]", *((bounded, f"{worst:.0%}") if run.bounded_rows else ("", "")),
        )  # fmt: skip
    console.print(table)
    for run in runs:
        for row in [*run.exact_rows, *run.bounded_rows]:
            for failure in row.failures[:2]:
                console.print(f"MISMATCH {_name(run)}: {row.op} ({row.backends[1]}): {failure}", style="red", markup=False)
    for run in runs:
        for backend, of_outputs in run.fast.items():
            counts = ", ".join(f"{name} {differ}/{total}" for name, (differ, total) in of_outputs.items())
            console.print(f"fast step on {backend}, {_name(run)}, values that differ: {counts}", markup=False)
    compared = sum(row.cases for run in runs for row in run.exact_rows)
    console.print(f"whole step: {sum(run.agreed for run in runs)}/{len(runs)} combinations agree, {compared} arrays compared")


def _name(run: StepParity) -> str:
    return f"{run.layout} B={run.B} fused={_on(run.fused_prologue)} overlap={_on(run.overlap_context_projection)}"


def _on(switch: bool) -> str:
    return "on" if switch else "off"
