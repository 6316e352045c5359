"""`python -m torch_bridge.parity`: every op on every backend of this machine, compared bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jdspark import ops
from jdspark.ops.backends import has_kernel, why_unavailable, why_unsupported
from jdspark.ops.block_attention import AttentionShape
from jdspark.ops.checks import FLOATS, dtype_name

from . import eager
from .bridge import compare, largest_difference, to_numpy, to_torch
from .cases import BOUNDED_OPS, EXACT_OPS, K3_SHAPES, PRODUCT_OPS, SHAPES, BatchShape, Case, draw_case

OP_NAMES = tuple(dict.fromkeys([*EXACT_OPS, *BOUNDED_OPS]))

BACKENDS = ("xla", "pallas", "triton", "torch eager", "torch triton")
"""Every backend; the first is the reference the others are compared with."""

NORM_ROPE_OPS = ("norm_rope", "norm_rope_store")
"""Bounded ops whose Pallas kernel has Triton's bits on a GPU."""

UPDATED = {
    **dict.fromkeys(("advance_ctx_len", "prepare_step"), "ctx_len"),
    **dict.fromkeys(
        ("store_gen_context", "scatter_context", "store_prepared", "norm_rope_store", "write_block_latents"), "pool"
    ),
}
"""The operand that an op updates in place on torch tensors, and returns."""

SLOW_ON_A_CPU = ("pallas", "torch triton")
"""Run in an interpreter there, a second or so per case: with the default backends they get fewer cases."""


def available_backends(device: str) -> dict[str, str | None]:
    """For each backend None if it runs on this device, else why not."""
    reasons: dict[str, str | None] = dict.fromkeys(BACKENDS)
    reasons["triton"] = why_unavailable("triton")
    if device == "cpu":
        if jax.default_backend() == "gpu":
            reasons["pallas"] = "with a GPU in the machine its kernels are compiled for that (--device gpu)"
        reasons["triton"] = reasons["triton"] or "Triton kernels inside JAX need a GPU"
        if os.environ.get("TRITON_INTERPRET") != "1":
            reasons["torch triton"] = "on a CPU it needs TRITON_INTERPRET=1 in the environment"
    return reasons


def has_op(op: str, backend: str) -> bool:
    """Whether the backend has an implementation of its own of this op."""
    if backend in ("xla", "torch eager"):
        return True
    if op == "context_latents":  # linear and norm_rope, which are compared by themselves
        return False
    return has_kernel(op, "pallas" if backend == "pallas" else "triton")


def untrusted(case: Case, backend: str, device: str) -> bool:
    """Whether the case is bf16 arithmetic in Triton's interpreter, which gets that wrong."""
    computes = case.bound is not None or case.op in PRODUCT_OPS
    return computes and case.dtype == "bfloat16" and device == "cpu" and backend == "torch triton"


def takes(backend: str, case: Case) -> bool:
    """Whether the backend's kernel takes operands of this case's shapes on this machine."""
    if case.op != "block_attention" or backend not in ("pallas", "triton"):
        return True
    query, block_latents, pool = (case.operands[name] for name in ("query", "block_latents", "pool"))
    shape = AttentionShape.of(query, block_latents, pool, case.static["kv_lora_rank"], case.static["layout"])
    return why_unsupported(case.op, backend, shape) is None


@functools.cache
def _jitted(op: str, backend: str, static: tuple[tuple[str, Any], ...], operand_names: tuple[str, ...]) -> Any:
    def call(*operands: Any) -> Any:
        return getattr(ops, op)(**dict(zip(operand_names, operands)), **dict(static), backend=backend)

    return jax.jit(call)


def run_jax(case: Case, backend: str) -> tuple[Any, ...]:
    """A case on one of JAX's backends, jitted."""
    static = tuple(sorted(case.static.items()))
    return flat(_jitted(case.op, backend, static, tuple(case.operands))(*case.operands.values()))


def flat(result: Any) -> tuple[Any, ...]:
    """The arrays of an op's result, named tuples inside named tuples included, without what is None."""
    if result is None:
        return ()
    return tuple(part for item in result for part in flat(item)) if isinstance(result, tuple) else (result,)


def as_strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with every element apart from its neighbour, as a slice of a wider tensor has them."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1::2]
    view.copy_(tensor)
    return view


def run_torch(case: Case, op: Callable[..., Any], device: str) -> tuple[Any, ...]:
    """A case on fresh torch tensors; strided cases get strided operands and int64 integers.

    Raises ValueError if the op returns something else than tensors, or another tensor than the one it should update.
    """

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
    results = flat(op(**operands, **case.static))
    for index, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise ValueError(f"result {index} is a {type(result).__name__}, expected a tensor")
    updated = UPDATED.get(case.op)
    if updated is not None and not any(result.data_ptr() == operands[updated].data_ptr() for result in results):
        raise ValueError(f"{updated} was not updated in place: no result is the tensor that was given")
    return results


def run(case: Case, backend: str, device: str) -> tuple[Any, ...]:
    """The outputs of a case on one backend."""
    if not backend.startswith("torch"):
        return run_jax(case, backend)
    module = eager if backend == "torch eager" else importlib.import_module("torch_bridge.triton_kernels")
    return run_torch(case, getattr(module, case.op), device)


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
    repeats: bool = False
    """A second run of the same backend instead of another one."""
    failures: list[str] = dataclasses.field(default_factory=list)


def check(case: Case, left: Sequence[Any], right: Sequence[Any], row: Row) -> None:
    """Compare one case's outputs and enter the result into the row."""
    problems = []
    if len(left) != len(right):
        problems.append(f"{len(left)} results, expected {len(right)}")
    else:
        for index, comparison in enumerate(map(compare, left, right)):
            if comparison.mismatches < 0:  # another shape or dtype
                problems.append(f"output {index}: {comparison.detail}")
            elif case.bound is None and not comparison:
                problems.append(f"output {index}: {comparison.mismatches} elements differ, {comparison.detail}")
    if case.bound is not None and not problems:
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
    op_names: Iterable[str] | None,
    cases: int,
    seed: int,
    device: str,
    *,
    backends: Sequence[str] | None = None,
    shapes: tuple[BatchShape, ...] = SHAPES,
    progress: bool = False,
) -> tuple[list[Row], list[Row]]:
    """Compare every other backend with XLA over `cases` random cases per op: (bitwise rows, bounded rows).

    Each case runs twice on XLA: a second run must give the same bits.

    Args:
        op_names: None means every op.
        shapes: what the cases walk through.
        backends: beside XLA. None means every one that is available; those of `SLOW_ON_A_CPU` then stop after 8 cases on
            a CPU, one of each shape.
    """
    selected = OP_NAMES if op_names is None else set(op_names)
    work = [(op, False) for op in EXACT_OPS if op in selected] + [(op, True) for op in BOUNDED_OPS if op in selected]
    others = [b for b, reason in available_backends(device).items() if reason is None and b != "xla"]
    few = SLOW_ON_A_CPU if backends is None and device == "cpu" else ()
    others = others if backends is None else list(backends)
    exact_rows: list[Row] = []
    bounded_rows: list[Row] = []
    for op, bounded in track(work, "comparing", transient=True, disable=not progress):
        rows: dict[tuple[str, str], Row] = {}
        kernels: dict[str, Row] = {}
        again = Row(op, ("xla", "xla twice"), repeats=True)
        for index in range(cases):
            case = draw_case(op, index, seed, bounded=bounded, shapes=shapes)
            reference = run(case, "xla", device)
            results: dict[str, tuple[Any, ...]] = {}
            for other in others:
                if not has_op(op, other) or not takes(other, case) or (other in few and index >= len(SHAPES)):
                    continue
                if untrusted(case, other, device):
                    continue
                name = f"{op} {case.dtype}" if bounded else op
                row = rows.setdefault((name, other), Row(name, ("xla", other), bound=case.bound))
                results[other] = run(case, other, device)
                check(case, results[other], reference, row)
            if bounded and device == "cuda":  # one source, one set of bits, whoever launches it
                for other in ("triton", "pallas") if op in NORM_ROPE_OPS else ("triton",):
                    if other in results and "torch triton" in results:
                        row = kernels.setdefault(other, Row(op, ("torch triton", other)))
                        check(dataclasses.replace(case, bound=None), results[other], results["torch triton"], row)
            check(dataclasses.replace(case, bound=None), run(case, "xla", device), reference, again)
        (bounded_rows if bounded else exact_rows).extend(rows.values())
        exact_rows.extend([*kernels.values(), again])
    return exact_rows, bounded_rows


def compare_candidate(
    op: str,
    candidate: Callable[..., Any],
    *,
    cases: int = 64,
    seed: int = 0,
    device: str = "cpu",
    against: str = "xla",
    shapes: tuple[BatchShape, ...] = SHAPES,
) -> tuple[list[Row], list[Row]]:
    """Compare somebody's own torch or Triton implementation of one op with one of ours: (bitwise rows, bounded rows).

    Args:
        candidate: called as `torch_bridge.eager.<op>` is: the same argument names on torch tensors of `device`, a pool and
            `ctx_len` updated in place, the same results. It sees strided and int64 tensors, both layouts, hostile values.
        device: `"cpu"` or `"cuda"`.
        against: a backend of `BACKENDS`. Any but `"xla"` is compared bitwise, also where the op may round: then a candidate
            is asked for the very bits of, say, `"torch triton"`.

    Raises:
        ValueError: unknown op, backend or device, or no GPU for `"cuda"`.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"compare_candidate: device is {device!r}, expected 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("compare_candidate: device is 'cuda', but torch sees no GPU here")
    if op not in OP_NAMES:
        raise ValueError(f"compare_candidate: unknown op {op!r}; known are {', '.join(OP_NAMES)}")
    if against not in BACKENDS or not has_op(op, against):
        raise ValueError(f"compare_candidate: {against!r} has no {op}; backends are {', '.join(BACKENDS)}")
    exact_rows: list[Row] = []
    bounded_rows: list[Row] = []
    for bounded, draws in ((False, EXACT_OPS), (True, BOUNDED_OPS)):
        if op not in draws:
            continue
        rows: dict[str, Row] = {}
        for index in range(cases):
            case = draw_case(op, index, seed, bounded=bounded, shapes=shapes)
            if untrusted(case, against, device):
                continue
            if against != "xla":
                case = dataclasses.replace(case, bound=None)
            name = f"{op} {case.dtype}" if case.bound else op
            row = rows.setdefault(name, Row(name, (against, "candidate"), bound=case.bound))
            try:
                result = run_torch(case, candidate, device)
            except Exception as error:
                row.cases += 1
                row.failures.append(f"{case.label}: raised {type(error).__name__}: {error}")
                continue
            check(case, result, run(case, against, device), row)
        (bounded_rows if bounded and against == "xla" else exact_rows).extend(rows.values())
    return exact_rows, bounded_rows


def load_candidate(name: str) -> Callable[..., Any]:
    """`"module:function"`, the module importable from the current folder. Raises ValueError saying what is wrong."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)


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
    if exact_rows:
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
    repeats = [row for row in exact_rows if row.repeats]
    across = [row for row in exact_rows if not row.repeats]
    same, runs = sum(row.passed for row in repeats), sum(row.cases for row in repeats)
    if repeats:
        console.print(f"repeated: {same}/{runs} cases gave the same bits in a second run")
    passed, total = sum(row.passed for row in across), sum(row.cases for row in across)
    if bounded_rows:
        within, of = sum(row.passed for row in bounded_rows), sum(row.cases for row in bounded_rows)
        console.print(f"bounded: {within}/{of} cases within their bound")
    if across or not bounded_rows:
        console.print(f"parity: {passed}/{total} cases bit-identical")


def _verdict(row: Row) -> str:
    return str(row.passed) if row.passed == row.cases else f"[red]{row.passed}[/red]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_bridge.parity", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where both frameworks run (default cpu)")
    parser.add_argument("--ops", help=f"comma-separated, of: {', '.join(OP_NAMES)} (default all)")
    parser.add_argument("--cases", type=int, default=64, help="random cases per op (default 64: every family on every shape)")
    parser.add_argument("--backends", help=f"comma-separated, of: {', '.join(BACKENDS[1:])} (default: those that run here)")
    parser.add_argument("--shapes", choices=("test", "k3"), default="test", help="k3: one rank of Kimi K3, for a GPU")
    parser.add_argument("--candidate", metavar="MODULE:FUNCTION", help="your implementation of the one op that --ops names")
    parser.add_argument("--against", default="xla", help="backend that the candidate is compared with (default xla)")
    parser.add_argument("--whole-step", action="store_true", help="whole decode steps with the state carried, instead of ops")
    parser.add_argument("--steps", type=int, help="of --whole-step (default 100 on a GPU, 2 on a CPU)")
    parser.add_argument("--layouts", default="layer_major,page_major", help="pool layouts of --whole-step")
    parser.add_argument("--batches", default="1,4", help="gen rows of --whole-step, of 1 and 4 (one of the 4 is a dummy)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args(argv)
    selected = args.ops.split(",") if args.ops else OP_NAMES
    unknown = sorted(set(selected) - set(OP_NAMES))
    if unknown:
        parser.error(f"--ops: unknown {', '.join(unknown)}; known are {', '.join(OP_NAMES)}")
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before any Triton kernel is imported
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory, too
    backends = [name.strip() for name in args.backends.split(",")] if args.backends else None
    for backend in backends or []:
        if backend not in BACKENDS[1:]:
            parser.error(f"--backends: unknown {backend!r}; known are {', '.join(BACKENDS[1:])}")
        reason = available_backends(args.device)[backend]
        if reason is not None:
            parser.error(f"--backends: {backend} is not available on {args.device}: {reason}")
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}, expected 0 or more")
    if args.json:
        try:
            args.json.write_text("", encoding="utf-8")
        except OSError as error:
            parser.error(f"--json: {args.json} cannot be written: {error}")
    if args.cases < 1:
        parser.error(f"--cases is {args.cases}, expected at least 1")
    platforms = {"cpu": "cpu", "gpu": "cuda"}
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("--device gpu: torch sees no CUDA device")
    try:
        jax_device = jax.devices(platforms[args.device])[0]
    except RuntimeError as error:
        parser.error(f"--device {args.device}: JAX has no such device: {error}")

    candidate = None
    if args.candidate:
        if len(set(selected)) != 1:
            parser.error("--candidate needs --ops with the one op that it implements")
        try:
            candidate = load_candidate(args.candidate)
        except ValueError as error:
            parser.error(f"--candidate: {error}")
        if args.against not in BACKENDS or not has_op(args.ops, args.against):
            parser.error(f"--against: {args.against!r} has no {args.ops}; backends are {', '.join(BACKENDS)}")
        if reason := available_backends(platforms[args.device])[args.against]:
            parser.error(f"--against: {args.against} is not available on {args.device}: {reason}")
    steps = args.steps if args.steps is not None else {"cpu": 2, "gpu": 100}[args.device]
    if steps < 1:
        parser.error(f"--steps is {steps}, expected at least 1")
    layouts, batches = args.layouts.split(","), args.batches.split(",")
    if set(layouts) - {"layer_major", "page_major"} or set(batches) - {"1", "4"}:
        parser.error(f"--layouts are layer_major and page_major, --batches 1 and 4; got {args.layouts} and {args.batches}")

    # XLA's fp32 products on a GPU are TF32 unless told otherwise, torch's are not
    jax.config.update("jax_default_matmul_precision", "highest")
    console = report_console()
    shapes = K3_SHAPES if args.shapes == "k3" else SHAPES
    with jax.default_device(jax_device):
        if args.whole_step:
            from .step_parity import print_step_report, run_step_parity

            runs = list(
                track(
                    run_step_parity(
                        platforms[args.device], steps, args.seed, layouts=layouts, batches=[int(B) for B in batches]
                    ),
                    "comparing steps",
                    total=4 * len(layouts) * len(batches),
                    transient=True,
                    disable=not console.is_terminal,
                )
            )
            _write_json(args.json, {"runs": [dataclasses.asdict(run) for run in runs]})
            print_step_report(console, runs)
            return 0 if runs and all(run.agreed for run in runs) else 1
        if candidate is not None:
            exact_rows, bounded_rows = compare_candidate(
                args.ops,
                candidate,
                cases=args.cases,
                seed=args.seed,
                device=platforms[args.device],
                against=args.against,
                shapes=shapes,
            )
        else:
            exact_rows, bounded_rows = run_parity(
                selected,
                args.cases,
                args.seed,
                platforms[args.device],
                backends=backends,
                shapes=shapes,
                progress=console.is_terminal,
            )
    rows = {"exact": exact_rows, "bounded": bounded_rows}
    _write_json(args.json, {kind: [dataclasses.asdict(row) for row in of_kind] for kind, of_kind in rows.items()})
    print_report(console, exact_rows, bounded_rows)
    return 0 if parity_ok(exact_rows, bounded_rows) else 1


def _write_json(file: Path | None, report: dict[str, Any]) -> None:
    if file:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
