"""`python -m torch_bridge.parity`: every op on every backend of this machine, compared bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jdspark import ops
from jdspark.ops.checks import FLOATS, dtype_name

from . import eager
from .bridge import compare, largest_difference, to_numpy, to_torch
from .cases import BOUNDED_OPS, EXACT_OPS, Case, draw_case

OP_NAMES = tuple(dict.fromkeys([*EXACT_OPS, *BOUNDED_OPS]))

BACKENDS = ("xla", "eager")
"""Backends compared here, the reference first."""


@functools.cache
def _jitted(op: str, static: tuple[tuple[str, Any], ...], operand_names: tuple[str, ...]) -> Any:
    def call(*operands: Any) -> Any:
        return getattr(ops, op)(**dict(zip(operand_names, operands)), **dict(static))

    return jax.jit(call)


def run_xla(case: Case) -> tuple[Any, ...]:
    """The plain JAX definition, jitted."""
    static = tuple(sorted(case.static.items()))
    result = _jitted(case.op, static, tuple(case.operands))(*case.operands.values())
    return flat(result)


def flat(result: Any) -> tuple[Any, ...]:
    """The arrays of an op's result, named tuples inside named tuples included."""
    return tuple(part for item in result for part in flat(item)) if isinstance(result, tuple) else (result,)


def as_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with every element apart from its neighbour, as a slice of a wider tensor has them."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1::2]
    view.copy_(tensor)
    return view


def run_eager(case: Case, device: str) -> tuple[Any, ...]:
    """The torch chain on fresh tensors; strided cases get strided operands and int64 integers."""

    def operand(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(operand(name, part) for part in value))
        tensor = to_torch(jax.numpy.asarray(value), copy=True).to(device)
        if not case.strided or name == "pool":
            return tensor
        if tensor.dtype == torch.int32 and name != "encoded_offsets":
            tensor = tensor.long()
        return as_strided(tensor)

    operands = {name: operand(name, value) for name, value in case.operands.items()}
    result = getattr(eager, case.op)(**operands, **case.static)
    return flat(result)


def run(case: Case, backend: str, device: str) -> tuple[Any, ...]:
    """The outputs of a case on one backend."""
    return run_xla(case) if backend == "xla" else run_eager(case, device)


@dataclasses.dataclass
class Row:
    """One line of the report: an op on a pair of backends."""

    op: str
    backends: tuple[str, str]
    cases: int = 0
    passed: int = 0
    bound: float | None = None
    """None for a bitwise comparison."""
    worst: float = 0.0
    """Largest `max|a - b| / max|b|` seen, bounded comparisons only."""
    failures: list[str] = dataclasses.field(default_factory=list)


def check(case: Case, left: Sequence[Any], right: Sequence[Any], row: Row) -> None:
    """Compare one case's outputs and enter the result into the row."""
    problems = []
    if case.bound is None:
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            comparison = compare(a, b)
            if not comparison:
                problems.append(f"output {index}: {comparison.mismatches} elements differ, {comparison.detail}")
    else:
        if case.op == "markov_chain":
            left, right = before_first_tie(left, right)
        worst = max(largest_difference(a, b) for a, b in zip(left, right) if dtype_name(a) in FLOATS)
        row.worst = max(row.worst, worst)
        if not worst <= case.bound:
            problems.append(f"off by {worst:.3g}, bound {case.bound:.3g}")
    row.cases += 1
    row.passed += not problems
    if problems:
        row.failures.append(f"{case.label}: {'; '.join(problems)}")


def before_first_tie(left: Sequence[Any], right: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both chains' logits, without the slots that follow a token they disagree on: those had different inputs.

    The slot of the disagreement itself stays in: its two logits must be within the bound of each other.
    """
    (logits_a, tokens_a), (logits_b, tokens_b) = ([to_numpy(part).copy() for part in side] for side in (left, right))
    disagreed_before = np.cumsum(tokens_a != tokens_b, axis=1) - (tokens_a != tokens_b) > 0
    for logits in (logits_a, logits_b):
        logits[disagreed_before] = 0
    return [logits_a], [logits_b]


def run_parity(
    op_names: Iterable[str] | None, cases: int, seed: int, device: str, *, progress: bool = False
) -> tuple[list[Row], list[Row]]:
    """Compare every other backend with the first over `cases` random cases per op: (bitwise rows, bounded rows).

    `op_names` None means every op.

    Each case runs twice on the reference: a second run must give the same bits.
    """
    selected = OP_NAMES if op_names is None else set(op_names)
    work = [(op, False) for op in EXACT_OPS if op in selected] + [(op, True) for op in BOUNDED_OPS if op in selected]
    exact_rows: list[Row] = []
    bounded_rows: list[Row] = []
    for op, bounded in track(work, "comparing", transient=True, disable=not progress):
        rows: dict[tuple[str, str], Row] = {}
        again = Row(op, (BACKENDS[0], f"{BACKENDS[0]} twice"))
        for index in range(cases):
            case = draw_case(op, index, seed, bounded=bounded)
            reference = run(case, BACKENDS[0], device)
            for other in BACKENDS[1:]:
                name = f"{op} {case.dtype}" if bounded else op
                row = rows.setdefault((name, other), Row(name, (BACKENDS[0], other), bound=case.bound))
                check(case, run(case, other, device), reference, row)
            check(dataclasses.replace(case, bound=None), run(case, BACKENDS[0], device), reference, again)
        (bounded_rows if bounded else exact_rows).extend(rows.values())
        exact_rows.append(again)
    return exact_rows, bounded_rows


def parity_ok(exact_rows: Sequence[Row], bounded_rows: Sequence[Row]) -> bool:
    """Whether something was compared and everything agreed."""
    rows = [*exact_rows, *bounded_rows]
    return bool(rows) and all(row.passed == row.cases > 0 for row in rows)


def report_console() -> Console:
    """The terminal, or 120 columns where the output goes to a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def print_report(console: Console, exact_rows: Sequence[Row], bounded_rows: Sequence[Row]) -> None:
    """Print the tables, the failures and the last line."""
    table = Table("op", "backends", "cases", "bit-identical", title="bitwise")
    for row in exact_rows:
        table.add_row(row.op, " / ".join(row.backends), str(row.cases), _verdict(row))
    console.print(table)
    if bounded_rows:
        table = Table("op", "backends", "cases", "within bound", "bound", "worst seen", title="bounded: max|a-b| / max|b|")
        for row in bounded_rows:
            table.add_row(
                row.op, " / ".join(row.backends), str(row.cases), _verdict(row), f"{row.bound:.2e}", f"{row.worst:.2e}"
            )
        console.print(table)
    for row in [*exact_rows, *bounded_rows]:
        for failure in row.failures[:5]:
            console.print(f"MISMATCH {row.op} ({' / '.join(row.backends)}): {failure}", style="red", markup=False)
    passed, total = sum(row.passed for row in exact_rows), sum(row.cases for row in exact_rows)
    if bounded_rows:
        within, of = sum(row.passed for row in bounded_rows), sum(row.cases for row in bounded_rows)
        console.print(f"bounded: {within}/{of} cases within their bound")
    console.print(f"parity: {passed}/{total} cases bit-identical")


def _verdict(row: Row) -> str:
    return str(row.passed) if row.passed == row.cases else f"[red]{row.passed}[/red]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_bridge.parity", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where both frameworks run (default cpu)")
    parser.add_argument("--ops", help=f"comma-separated, of: {', '.join(OP_NAMES)} (default all)")
    parser.add_argument("--cases", type=int, default=32, help="random cases per op (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args(argv)
    selected = args.ops.split(",") if args.ops else OP_NAMES
    unknown = sorted(set(selected) - set(OP_NAMES))
    if unknown:
        parser.error(f"--ops: unknown {', '.join(unknown)}; known are {', '.join(OP_NAMES)}")
    if args.cases < 1:
        parser.error(f"--cases is {args.cases}, expected at least 1")
    platforms = {"cpu": "cpu", "gpu": "cuda"}
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("--device gpu: torch sees no CUDA device")
    try:
        jax_device = jax.devices(platforms[args.device])[0]
    except RuntimeError as error:
        parser.error(f"--device {args.device}: JAX has no such device: {error}")

    console = report_console()
    with jax.default_device(jax_device):
        exact_rows, bounded_rows = run_parity(
            selected, args.cases, args.seed, platforms[args.device], progress=console.is_terminal
        )
    if args.json:
        report = {
            "exact": [dataclasses.asdict(r) for r in exact_rows],
            "bounded": [dataclasses.asdict(r) for r in bounded_rows],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(console, exact_rows, bounded_rows)
    return 0 if parity_ok(exact_rows, bounded_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
