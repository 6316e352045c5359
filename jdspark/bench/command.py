"""`python -m jdspark bench`.

In a full run on a GPU every part runs in a process of its own, so that one that crashes the device's context, or does not
end, costs the others nothing; the results are written as they come. `--quick` has no time to start four of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ..generate import check_plot
from . import report
from .clock import Deadline, Figures, describe
from .floors import copy_bandwidth
from .parts import PARTS, Row, Run, guarded
from .scale import Scale, choose_scale

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton")
LIMIT, QUICK_LIMIT = 1800.0, 110.0
"""Seconds, by default."""
GRACE = 30.0
"""Seconds past its limit after which a part's process is ended."""
TAG = "bench-row "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jdspark bench`."""
    parser.add_argument("--quick", action="store_true", help="one request at two contexts, in two minutes on a GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)} (default: all)")
    limits = f"for everything (default {LIMIT:.0f}, {QUICK_LIMIT:.0f} with --quick)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limits)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step's time against context and batch size")
    parser.add_argument("--seed", type=int, default=0, help="of weights and operands")
    parser.add_argument("--only-part", choices=tuple(PARTS), help=argparse.SUPPRESS)  # what the processes of the parts get
    parser.add_argument("--bandwidth", type=float, help=argparse.SUPPRESS)


def describe_run(scale: Scale, on_gpu: bool, bandwidth: float) -> dict[str, Any]:
    """Machine, versions and command of this run."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = jax.devices()[0]
    what = f"{scale.label} on {device.device_kind}; copy bandwidth {bandwidth / 1e12:.2f} TB/s"
    if not on_gpu:
        what = f"CPU figures, of {scale.label}: host time, no device time, and nothing about the speed on a GPU"
    return {
        "what": what,
        "on_gpu": on_gpu,
        "device": device.device_kind,
        "platform_version": getattr(device.client, "platform_version", ""),
        "copy_bandwidth": bandwidth,
        "python": platform.python_version(),
        "packages": versions,
        "command": " ".join(["python -m jdspark", *sys.argv[1:]]),
        "environment": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE")},
    }


def run_bench(args: argparse.Namespace, scale: Scale | None = None) -> int:
    """`jdspark bench`. Returns 1 if something that should have been measured was not.

    Args:
        scale: instead of the one for this machine.

    Raises:
        ValueError: an unknown part, a limit or a file that cannot be used, no rich for the tables.
    """
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise ValueError(f"--parts: unknown {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    limit = args.limit if args.limit is not None else QUICK_LIMIT if args.quick else LIMIT
    if not limit > 0:
        raise ValueError(f"--limit is {limit}, expected more than 0 seconds")
    if importlib.util.find_spec("rich") is None:
        raise ValueError("the tables need rich: pip install 'jdspark[cli]'")
    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"--json: {args.json.parent} is not a folder")
    if args.plot is not None:
        check_plot(args.plot)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    on_gpu = jax.default_backend() == "gpu"
    scale = choose_scale(on_gpu, args.quick) if scale is None else scale
    if args.only_part:
        run = Run(scale, on_gpu, args.bandwidth, args.seed, Deadline(limit))
        for row in guarded(run, args.only_part):
            print(TAG + json.dumps(row.to_json()), flush=True)
        return 0

    deadline = Deadline(limit)
    bandwidth = args.bandwidth or copy_bandwidth(scale.copied_bytes)
    machine = describe_run(scale, on_gpu, bandwidth)
    print(machine["what"], flush=True)
    rows: dict[tuple[str, str, int, int], Row] = {}
    shares = {part: share for part, (share, _) in PARTS.items() if part in chosen}
    for number, part in enumerate(shares):
        seconds = deadline.left() * shares[part] / sum(list(shares.values())[number:])  # what a part leaves goes to the rest
        if on_gpu and not args.quick and (part != "compile" or scale.compiled):
            of_part = in_process(args, part, bandwidth, seconds)
        else:
            of_part = guarded(Run(scale, on_gpu, bandwidth, args.seed, Deadline(seconds)), part)
        for row in of_part:
            rows[row.key] = row
            if not row.left_out:
                print(report.line(row), flush=True)
            if args.json is not None:
                report.write_json(args.json, list(rows.values()), machine)
    report.print_tables(list(rows.values()), machine)
    if args.plot is not None:
        report.plot(args.plot, list(rows.values()), machine)
    return 1 if any(row.figures.failed for row in rows.values()) else 0


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process and those that it started: compilers' workers would keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def in_process(args: argparse.Namespace, part: str, bandwidth: float, seconds: float) -> Iterator[Row]:
    """The rows of one part, from a process of its own, which is ended a little past its limit."""
    command = [
        sys.executable, "-m", "jdspark", "bench", "--only-part", part, "--bandwidth", repr(bandwidth),
        "--limit", repr(max(seconds, 1.0)), "--seed", str(args.seed), *(["--quick"] if args.quick else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    timer = threading.Timer(seconds + GRACE, end_group, [process])
    timer.start()
    last: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith(TAG):
                yield Row.from_json(json.loads(text.removeprefix(TAG)))
            else:
                print(text, end="", flush=True)
                last = [*last[-2:], text.strip()]
        code = process.wait()
    finally:
        timer.cancel()
        end_group(process)
        process.wait()
    if code:
        ended = "ended past its time limit" if code == -9 else f"exit status {code}: {' | '.join(last)}"
        yield Row(part, "all", 0, 0, 0, Figures(error=describe(RuntimeError(ended))))
