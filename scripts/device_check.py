"""Everything that needs a GPU, in one call: parity of every op and of whole steps at K3 rank shapes, the GPU tests, times, and
what the second switch gives.

`python scripts/device_check.py OUT_FOLDER` writes JSON and logs there and prints one table per part. The parity runs are
split over processes that share the GPU, since most of their time is compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

GROUPS = (
    "accept_strict", "markov_chain", "prepare_step", "store_gen_context", "store_prepared,next_tokens",
    "scatter_context,gen_prologue", "write_block_latents", "block_placement,advance_ctx_len",
    "refresh_block_tables,noise_block", "norm_rope", "norm_rope_store", "context_latents,block_attention",
    "linear,head_product", "rms_norm,rope,swiglu",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=84, help="per op")
    parser.add_argument("--backends", help="of the parity runs, but for norm_rope's (default: all)")
    parser.add_argument("--limit", type=float, default=270, help="seconds for the parity runs and the tests")
    parser.add_argument("--total", type=float, default=530, help="seconds for everything; op times that are done stay")
    parser.add_argument("--skip", default="", help="comma-separated, of parity, tests, steps, times, overlap")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU visible to torch, and everything here needs one")
    args.out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    skipped = set(args.skip.split(","))
    started = time.monotonic()
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    def start(name: str, *command: str) -> None:
        log = args.out / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=environment)
        running[name] = (process, log)

    if "parity" not in skipped:
        for number, names in enumerate(GROUPS):
            start(
                f"parity{number}", "-m", "torch_bridge.parity", "--device", "gpu", "--shapes", "k3", "--ops", names,
                "--cases", str(args.cases), "--json", str(args.out / f"parity{number}.json"),
                *(["--backends", args.backends] if args.backends and not names.startswith("norm_rope") else []),
            )  # fmt: skip
    if "tests" not in skipped:
        start(
            "tests", "-m", "pytest", "-q", "-m", "gpu", "tests", "-k", "not hundred_steps", "-p", "no:cacheprovider", "-n", "5"
        )
    failed = finish(running, started, min(args.limit, args.total))
    if "steps" not in skipped:
        combinations = [(layout, B) for layout in ("layer_major", "page_major") for B in ("1", "4")]
        for layout, B in combinations:
            start(
                f"steps_{layout}_{B}", "-m", "torch_bridge.parity", "--whole-step", "--device", "gpu", "--layouts", layout,
                "--batches", B, "--json", str(args.out / f"steps_{layout}_{B}.json"),
            )  # fmt: skip
        failed |= finish(running, started, min(args.limit + 200, args.total))
        for layout, B in combinations:
            print((args.out / f"steps_{layout}_{B}.log").read_text())
    if "parity" not in skipped:
        print_parity(sorted(args.out.glob("parity*.json")))
    if "times" not in skipped:  # alone on the GPU
        start("times", "scripts/time_ops.py", "--json", str(args.out / "op_times.json"))
        failed |= finish(running, started, args.total)
    if "overlap" not in skipped:
        start("overlap", "-m", "jdspark.bench.overlap", "--json", str(args.out / "overlap.json"))
        failed |= finish(running, started, args.total)
    return 1 if failed else 0


def finish(running: dict[str, tuple[subprocess.Popen[bytes], Path]], started: float, limit: float) -> bool:
    """Wait for the processes, no longer than `limit` seconds from the start; print the log of one that failed."""
    failed = False
    for name, (process, log) in running.items():
        try:
            code = process.wait(max(1.0, limit - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        failed |= code != 0
        print(f"{name}: exit {code} after {time.monotonic() - started:.0f} s", flush=True)
        if code or name in ("tests", "times", "overlap"):
            print("\n".join(log.read_text(errors="replace").splitlines()[-(80 if name == "times" else 25) :]), flush=True)
    running.clear()
    return failed


def print_parity(files: list[Path]) -> None:
    """One line per op and pair of backends, over all processes."""
    reports = [json.loads(text) for file in files if (text := file.read_text())]
    if len(reports) < len(files):
        print(f"parity: {len(files) - len(reports)} of {len(files)} runs did not finish; the table is of the others")
    rows = [(kind, row) for report in reports for kind, of_kind in report.items() for row in of_kind]
    for kind, row in rows:
        if kind == "exact" and not row["repeats"]:
            print(f"{row['op']:22}{' / '.join(row['backends']):22}{row['passed']:5}/{row['cases']}")
    for kind, row in rows:
        if kind == "bounded":
            backends = " / ".join(row["backends"])
            print(
                f"{row['op']:26}{backends:22}{row['passed']:5}/{row['cases']}  worst {row['worst']:.2e} of {row['bound']:.2e}"
            )
    exact = [row for kind, row in rows if kind == "exact"]
    exact = [row for row in exact if not row["repeats"]]
    print(f"parity: {sum(r['passed'] for r in exact)}/{sum(r['cases'] for r in exact)} cases bit-identical", flush=True)


if __name__ == "__main__":
    sys.exit(main())
