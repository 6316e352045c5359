"""The `jdspark` command line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from . import generate, lossless
from .bench import command as bench
from .checkpoint import CheckpointContents, CheckpointError, inspect_checkpoint
from .config import ConfigError
from .ops.backends import Backend, BackendUnavailable, why_unavailable
from .paths import overlap_mechanism

PACKAGES = (
    "jdspark", "jax", "jaxlib", "numpy", "safetensors", "rich", "matplotlib", "optax", "torch", "triton", "jax-triton"
)  # fmt: skip


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_backends() -> dict[str, str]:
    """Per backend: `available`, with how it runs here, or why it is not."""
    on_gpu = jax.default_backend() == "gpu"
    torch, triton = installed_version("torch"), installed_version("triton")
    described = {}
    for backend in get_args(Backend):
        reason = why_unavailable(backend)
        described[backend] = f"not available: {reason}" if reason else "available"
    if not on_gpu:
        described["pallas"] += " (no GPU: runs in the Mosaic GPU interpreter, slowly)"
    described["torch eager"] = "available" if torch else "not available: torch is not installed (pip install -e '.[torch]')"
    if torch and triton:
        described["torch triton"] = "available" if on_gpu else "available (no GPU: with TRITON_INTERPRET=1, slowly)"
    else:
        described["torch triton"] = "not available: torch and triton are not installed (pip install -e '.[torch]')"
    return described


def describe_machine() -> dict[str, Any]:
    """Python, packages, JAX devices, backends and the second switch's mechanism on this machine."""
    return {
        "python": platform.python_version(),
        "packages": {package: installed_version(package) or "not installed" for package in PACKAGES},
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "backends": describe_backends(),
        "overlap_context_projection": str(overlap_mechanism()),
    }


def describe_checkpoint(contents: CheckpointContents) -> dict[str, Any]:
    """Config, heads and tensors of a checkpoint folder, and everything that keeps it from loading."""
    config = contents.config
    markov = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    confidence = "none"
    if config.enable_confidence_head:
        confidence = "with Markov embedding" if config.confidence_head_with_markov else "hidden state only"
    convention = "0..K-1 (DSpark, shift_label)" if config.shift_label else "1..K (DFlash)"
    block = "the run's max_draft_len" + ("" if config.shift_label else " + 1")
    return {
        "config": dataclasses.asdict(config),
        "drafts come from block slots": convention,
        "block": block + (f", at most {config.block_size}" if config.block_size else ""),
        "latent per token and layer": config.latent_dim,
        "markov head": markov,
        "confidence head": confidence,
        "mask row": "trained" if "mask_token_embedding" in contents.tensors else f"embedding of token {config.mask_token_id}",
        "parameters": sum(math.prod(stored.shape) for stored in contents.tensors.values()),
        "tensors": {
            name: f"{stored.dtype} {list(stored.shape)}" + (f" as {stored.stored_name}" if stored.stored_name != name else "")
            for name, stored in sorted(contents.tensors.items())
        },
        "skipped": list(contents.skipped),
        "unknown": list(contents.unknown),
        "missing": list(contents.missing),
        "problems": contents.problems(),
    }


def print_tree(tree: dict[str, Any], indent: int = 0) -> None:
    """Print nested dictionaries and lists as indented lines."""
    for key, value in tree.items():
        pad = "  " * indent
        if isinstance(value, dict):
            print(f"{pad}{key}:")
            print_tree(value, indent + 1)
        elif isinstance(value, list | tuple):
            print(f"{pad}{key}: {', '.join(str(item) for item in value) or 'none'}")
        else:
            print(f"{pad}{key}: {value}")


def run_info(checkpoint: Path | None, as_json: bool) -> int:
    """`jdspark info`: returns 1 if the checkpoint does not load."""
    report: dict[str, Any] = {"machine": describe_machine()}
    if checkpoint is not None:
        try:
            report["checkpoint"] = describe_checkpoint(inspect_checkpoint(checkpoint))
        except (CheckpointError, ConfigError) as error:
            report["checkpoint"] = {"problems": [str(error)]}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_tree(report)
    problems = report.get("checkpoint", {}).get("problems", [])
    for problem in problems:
        print(f"jdspark info: {checkpoint}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="jdspark", description="The DSpark / DFlash drafter decode step in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="this machine, its backends, and what a checkpoint folder holds")
    info.add_argument("checkpoint", nargs="?", type=Path, help="a folder with config.json and *.safetensors")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    generate.add_arguments(
        commands.add_parser(
            "generate", help="continue a text with the shipped target and drafter, and say what drafting was worth"
        )
    )
    lossless.add_arguments(
        commands.add_parser("lossless", help="compare greedy text with drafting to the target's own, on held-out source files")
    )
    bench.add_arguments(
        commands.add_parser("bench", help="time the decode step and its parts on this machine, and torch beside them")
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "generate":
            status = generate.run_generate(args)
        elif args.command == "lossless":
            status = lossless.run_lossless(args)
        elif args.command == "bench":
            status = bench.run_bench(args)
        else:
            status = run_info(args.checkpoint, args.json)
        sys.stdout.flush()  # a reader that is gone shows here at the latest, not while Python shuts down
        return status
    except BrokenPipeError:  # `jdspark info | head`: the reader has seen enough; it is an OSError, so it comes first
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, BackendUnavailable) as error:  # what the user asked for cannot be done; says why
        parser.exit(2, f"jdspark {args.command}: {error}\n")
