"""Device time of each op on plain XLA, Pallas and (inside JAX) Triton, at K3 rank shapes, from one profile.

`python scripts/time_ops.py [--json jdspark/op_times.json]` on a machine with a GPU. Microseconds of kernel time per call,
launch gaps not counted, mean of `--repeat` calls on alternating inputs. The JSON is the table that `backend="auto"` goes by.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdspark import ops
from jdspark.bench.profile import kernel_times
from jdspark.ops.backends import has_kernel, why_unavailable
from torch_bridge.cases import BOUNDED_OPS, EXACT_OPS, K3_SHAPES, BatchShape, draw_batch

TIMED_OPS = (
    "prepare_step", "store_prepared", "noise_block", "write_block_latents", "norm_rope", "norm_rope_store", "next_tokens",
    "accept_strict", "markov_chain", "refresh_block_tables", "gen_prologue", "store_gen_context", "advance_ctx_len",
    "scatter_context", "block_placement",
)  # fmt: skip

TIMED_SHAPES = tuple(K3_SHAPES[index] for index in (0, 5, 1, 6))

UNIT = "us of kernel time per call, launch gaps not counted"


def draw(op: str, shape: BatchShape, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An op's operands on the device, drawn for the plain family."""
    rng = np.random.default_rng(seed)
    batch = draw_batch(rng, shape, "plain")
    while True:  # until the case writes all layers, or drafts
        operands, static = (EXACT_OPS.get(op) or BOUNDED_OPS[op])(rng, batch)
        if static.get("layer") is None and (op != "prepare_step" or "embedding" in operands):
            break
    operands = jax.tree.map(jnp.asarray, operands)
    if op == "prepare_step":
        return {name: value for name, value in operands.items() if name != "mask_row"}, static | {"advance": True}
    return operands, static | ({"return_latents": False} if op == "norm_rope_store" else {})


def segment(op: str, shape: BatchShape, backend: str) -> Callable[[], Any]:
    """A function that runs the op once, compiled and warmed up. A pool is donated and carried from call to call."""
    draws = [draw(op, shape, seed) for seed in range(3)]
    static = draws[0][1]
    call = jax.jit(
        lambda pool, rest: getattr(ops, op)(**(rest if pool is None else {"pool": pool, **rest}), **static, backend=backend),
        donate_argnums=0,
    )
    state: dict[str, Any] = {"pool": draws[0][0].pop("pool", None), "calls": 0}
    for operands, _ in draws[1:]:
        operands.pop("pool", None)

    def run() -> Any:
        rest = draws[state["calls"] % len(draws)][0]
        state["calls"] += 1
        result = call(state["pool"], rest)
        if state["pool"] is not None:
            state["pool"] = result[0] if isinstance(result, tuple) else result
        return result

    for _ in draws:
        jax.block_until_ready(run())
    return run


def time_op(op: str, backends: list[str], repeat: int) -> list[dict[str, Any]]:
    """One row per shape: microseconds and launches per call on each backend. Says on stdout what could not be run."""
    labels, segments = [], []
    for shape in TIMED_SHAPES:
        for backend in backends:
            if backend != "xla" and not has_kernel(op, backend):
                continue
            try:
                segments.append(segment(op, shape, backend))
                labels.append((shape, backend))
            except (RuntimeError, ValueError, TypeError) as error:
                print(f"{op} on {backend} at B={shape.B}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    rows: dict[BatchShape, dict[str, Any]] = {}
    for (shape, backend), (microseconds, launches) in zip(labels, kernel_times(segments, repeat), strict=True):
        empty = {"B": shape.B, "columns": shape.max_blocks, "contexts": shape.num_contexts, "launches": {}}
        row = rows.setdefault(shape, empty)
        row[backend] = round(microseconds, 2)
        row["launches"][backend] = round(launches, 2)
    return list(rows.values())


def merge(file: Path, command: str, op: str, rows: list[dict[str, Any]]) -> None:
    """Put an op's rows into the table, keeping the other ops' of the same machine; the file is whole at any moment."""
    table = {"machine": jax.devices()[0].device_kind, "command": command, "unit": UNIT, "ops": {}}
    if file.exists():
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if earlier["machine"] != table["machine"]:
            raise SystemExit(f"{file} holds times of {earlier['machine']}, this is {table['machine']}: name another --json")
        table["ops"] = earlier["ops"]
    table["ops"][op] = rows
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table here after each op; ops that are not timed keep their rows")
    parser.add_argument("--ops", default=",".join(TIMED_OPS), help="comma-separated (default: all)")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--command", default="python scripts/time_ops.py", help="recorded in the JSON")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("no GPU: these would be times of an interpreter")
    backends = ["xla", "pallas"] + ([] if why_unavailable("triton") else ["triton"])
    print(f"{'op':22}{'B':>4}{'columns':>9}{'contexts':>9}" + "".join(f"{b + ' us':>11}{'launches':>9}" for b in backends))
    failed = False
    for op in args.ops.split(","):
        try:
            rows = time_op(op, backends, args.repeat)
        except (RuntimeError, ValueError) as error:
            print(f"{op}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            failed = True
            continue
        for row in rows:
            times = "".join(f"{row[b]:11.2f}{row['launches'][b]:9.2f}" if b in row else " " * 20 for b in backends)
            print(f"{op:22}{row['B']:4}{row['columns']:9}{row['contexts']:9}{times}", flush=True)
        complete = [row for row in rows if set(row["launches"]) >= {b for b in backends if b == "xla" or has_kernel(op, b)}]
        failed |= len(complete) < len(TIMED_SHAPES)
        if args.json:
            merge(args.json, args.command, op, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
