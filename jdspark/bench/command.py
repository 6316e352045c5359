"""`python -m jdspark bench`.

On a GPU a run is cut into jobs, each in a process of its own: one that crashes the device's context, or does not end, costs the
others nothing, and several trace and compile side by side, which takes most of the time. Then one after the other is told that
it is its turn, and measures with nothing else running. Results are written as they come. On a CPU this process does it all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from ..generate import check_plot
from . import report
from .clock import Deadline, Figures, describe
from .floors import copy_bandwidth
from .parts import NO_TIME, PARTS, Job, Row, Run, guarded, jobs_of
from .scale import Scale, choose_scale

PACKAGES = ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton")
LIMIT, QUICK_LIMIT = 1800.0, 100.0
"""Seconds, by default."""
GRACE = 15.0
"""Seconds past the limit after which what still runs is ended."""
ENDED = "still running past the time limit, and ended"
TAG, READY = "bench-row ", "bench-ready"
"""What a job's process writes: a row, and that it is prepared."""

JOB_BYTES = 17 << 30
"""Of the device's memory for each job, at the most: weights and embedding, and in both frameworks a pool and operands. Each
framework also keeps what it needed only to draw or to compile them."""
MOST_TOGETHER = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jdspark bench`."""
    parser.add_argument("--quick", action="store_true", help="one request, no parts, in two minutes on a GPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)} (default: all)")
    limits = f"for everything (default {LIMIT:.0f}, {QUICK_LIMIT:.0f} with --quick)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limits)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there, as they come")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step's time against context and batch size")
    parser.add_argument("--seed", type=int, default=0, help="of weights and operands")
    parser.add_argument("--only-job", type=int, help=argparse.SUPPRESS)  # what the processes of the jobs get
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
        raise ValueError("the tables need rich: pip install -e '.[cli]'")
    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"--json: {args.json.parent} is not a folder")
    if args.plot is not None:
        check_plot(args.plot)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    on_gpu = jax.default_backend() == "gpu"
    scale = choose_scale(on_gpu, args.quick) if scale is None else scale
    if args.only_job is not None:
        for row in rows_of_job(args, jobs_of(scale, chosen)[args.only_job], on_gpu, limit):
            print(TAG + json.dumps(row.to_json()), flush=True)
        return 0

    deadline = Deadline(limit)
    bandwidth = args.bandwidth or copy_bandwidth(scale.copied_bytes)
    machine = describe_run(scale, on_gpu, bandwidth)
    print(machine["what"], flush=True)
    rows: dict[tuple[str, str, int, int], Row] = {}
    if on_gpu:
        found = run_jobs(args, jobs_of(scale, chosen), bandwidth, deadline, jobs_together())
    else:
        found = run_here(scale, chosen, bandwidth, args.seed, deadline)
    for row in found:
        rows[row.key] = row
        if not row.left_out:
            print(report.line(row), flush=True)
        if args.json is not None:
            report.write_json(args.json, list(rows.values()), machine)
    report.print_tables(list(rows.values()), machine)
    if args.plot is not None:
        report.plot(args.plot, list(rows.values()), machine)
    return 1 if any(row.figures.failed for row in rows.values()) else 0


def run_here(scale: Scale, chosen: Sequence[str], bandwidth: float, seed: int, deadline: Deadline) -> Iterator[Row]:
    """The rows of all chosen parts on a CPU, in this process; each has its share of the time."""
    shares = {part: share for part, (share, _) in PARTS.items() if part in chosen}
    for number, part in enumerate(shares):
        seconds = deadline.left() * shares[part] / sum(list(shares.values())[number:])  # what a part leaves goes to the rest
        yield from guarded(Run(scale, False, bandwidth, seed, Deadline(seconds)), part)


def rows_of_job(args: argparse.Namespace, job: Job, on_gpu: bool, limit: float) -> Iterator[Row]:
    """The rows of one job, in its own process: prepares, says so, and waits on its input for the seconds that it has."""
    deadline = Deadline(limit)

    @functools.cache
    def turn() -> None:
        print(READY, flush=True)
        deadline.restart(float(sys.stdin.readline()))

    yield from guarded(Run(job.scale, on_gpu, args.bandwidth, args.seed, deadline, turn), job.part, job.cell)


def jobs_together() -> int:
    """How many jobs this machine can prepare side by side."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return max(1, min(MOST_TOGETHER, (os.cpu_count() or 1) // 2, memory // JOB_BYTES))


def run_jobs(
    args: argparse.Namespace, jobs: Sequence[Job], bandwidth: float, deadline: Deadline, together: int
) -> Iterator[Row]:
    """The rows of all jobs: so many prepare side by side, then these are measured one after the other.

    What XLA found out about its products goes from one job to the next through a folder of JAX's persistent cache.
    """
    pending = [(number, job) for number, job in enumerate(jobs) if not job.empty]
    for job in jobs:
        if job.empty:  # its row says why
            yield from guarded(Run(job.scale, True, bandwidth, args.seed, deadline), job.part)
    with tempfile.TemporaryDirectory(prefix="jdspark-bench-", ignore_cleanup_errors=True) as folder:
        environment = {"JAX_COMPILATION_CACHE_DIR": folder, **os.environ}
        for batch in itertools.batched(pending, together):
            processes = []
            if deadline.left():
                print(f"preparing {len(batch)} of {len(pending)} jobs", flush=True)
                processes = [JobProcess(args, number, job, bandwidth, deadline, environment) for number, job in batch]
            try:
                for process in processes:
                    process.prepare()
                for position, (_, job) in enumerate(batch):
                    if processes:
                        yield from processes[position].early
                    if deadline.left():
                        yield from processes[position].rows()
                    else:
                        yield Row(job.part, "all", *job.cell, 0, left_out=NO_TIME)
            finally:
                for process in processes:
                    process.end()


class JobProcess:
    """A job in a process of its own, which is ended a little past the deadline."""

    def __init__(
        self, args: argparse.Namespace, number: int, job: Job, bandwidth: float, deadline: Deadline, environment: dict[str, str]
    ):
        self._job, self._deadline = job, deadline
        command = [
            sys.executable, "-m", "jdspark", "bench", "--only-job", str(number), "--parts", args.parts,
            "--bandwidth", repr(bandwidth), "--limit", repr(max(deadline.left(), 1.0)), "--seed", str(args.seed),
            *(["--quick"] if args.quick else []),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment,
        )  # fmt: skip
        self._timer = threading.Timer(deadline.left() + GRACE, self._kill)
        self._timer.start()
        self.early: list[Row] = []
        """Rows from before the job's turn."""
        self._last: list[str] = []

    def _kill(self) -> None:
        """End the process and those that it started: compilers' workers would keep its output open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _lines(self) -> Iterator[str]:
        """Rows and `READY`; anything else is shown."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith((TAG, READY)):
                yield text
            else:
                print(text, end="", flush=True)
                self._last = [*self._last[-2:], text.strip()]

    def prepare(self) -> None:
        """Wait until the job is prepared, or has ended."""
        for text in self._lines():
            if text.startswith(READY):
                return
            self.early.append(row_of(text))

    def rows(self) -> Iterator[Row]:
        """The job's turn: its rows from then on, and one that says so if it did not end well or by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{self._deadline.left()}\n")
            self._process.stdin.close()
        yield from map(row_of, self._lines())
        code = self._process.wait()
        if code == -signal.SIGKILL and not self._deadline.left():
            yield Row(self._job.part, "all", *self._job.cell, 0, left_out=ENDED)
        elif code:
            ended = f"exit status {code}: {' | '.join(self._last)}"
            yield Row(self._job.part, "all", *self._job.cell, 0, Figures(error=describe(RuntimeError(ended))))

    def end(self) -> None:
        """End what is left of it."""
        self._timer.cancel()
        self._kill()
        self._process.wait()


def row_of(text: str) -> Row:
    """A row as a job's process writes it."""
    return Row.from_json(json.loads(text.removeprefix(TAG)))
