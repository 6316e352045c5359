"""`python -m jdspark.train OUT`: train the byte-level target, then its drafter, and write both with `training.json`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from ..byte_lm import ByteLMConfig, init_byte_lm, save_byte_lm
from ..checkpoint import save_drafter
from .corpus import Corpus, standard_library
from .drafter import drafter_for, init_drafter, train_drafter
from .loop import Progress, adamw, cast, schedule
from .target import evaluate_target, train_target

BLOCK = 7


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes of both trainings."""

    target: ByteLMConfig
    drafter_sizes: dict[str, int]
    dtype: str
    length: int
    target_steps: int
    target_batch: int
    target_lr: float
    drafter_steps: int
    drafter_batch: int
    anchors: int
    drafter_lr: float = 6e-4


SHIPPED = Recipe(ByteLMConfig(), {}, "bfloat16", 2048, 1900, 32, 2e-3, 6500, 16, 64)
"""The pair in the package; minutes on an H200."""

SMALL = Recipe(
    ByteLMConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, target_layer_ids=(0, 1, 2)),
    {"num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "intermediate_size": 192},
    "float32", 256, 400, 8, 3e-3, 300, 4, 16,
)  # fmt: skip
"""For a CPU, a few minutes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jdspark.train", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for target/, drafter/ and training.json")
    default = "small" if jax.default_backend() == "cpu" else "shipped"
    parser.add_argument("--recipe", choices=("shipped", "small"), default=default, help="default: small on a CPU")
    parser.add_argument("--corpus", type=Path, default=standard_library(), help="folder of *.py files (default: Python's own)")
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name, low in (("target_steps", 1), ("drafter_steps", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected {low} or more")
    recipe = SHIPPED if args.recipe == "shipped" else SMALL
    recipe = dataclasses.replace(
        recipe,
        target_steps=recipe.target_steps if args.target_steps is None else args.target_steps,
        drafter_steps=recipe.drafter_steps if args.drafter_steps is None else args.drafter_steps,
    )
    try:
        report = train_pair(recipe, args.corpus, args.out, args.seed)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(json.dumps({name: value for name, value in report.items() if name != "history"}, indent=2))
    return 0


def train_pair(recipe: Recipe, corpus_folder: Path, out: Path, seed: int) -> dict:
    """Train and write both models, their weights rounded to bf16; returns what `training.json` holds.

    Raises ValueError, OSError, before anything is trained, for a corpus that is too small or a folder that cannot be made.
    """
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read(corpus_folder)
    for name, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(tokens) <= recipe.length + 1:
            raise ValueError(f"corpus: {corpus_folder} has {len(tokens)} {name} tokens, a window takes {recipe.length + 1}")
    print(
        f"corpus: {corpus.num_train_files} files, {len(corpus.train)} tokens; held out {corpus.num_held_out_files} files,"
        f" {len(corpus.held_out)} tokens", flush=True,
    )  # fmt: skip
    started = time.monotonic()
    progress = Progress("target", recipe.target_steps)
    target = train_target(
        recipe.target, init_byte_lm(recipe.target, seed), corpus.train,
        steps=recipe.target_steps, batch=recipe.target_batch, length=recipe.length,
        optimizer=adamw(schedule(recipe.target_lr, recipe.target_steps), 0.1), dtype=recipe.dtype, seed=seed, progress=progress,
    )  # fmt: skip
    target = cast(target, "bfloat16")
    save_byte_lm(out / "target", recipe.target, target)
    evaluation = {"batch": recipe.target_batch, "length": recipe.length}
    bits = evaluate_target(recipe.target, cast(target, recipe.dtype), corpus.held_out, **evaluation)
    target_seconds = time.monotonic() - started
    print(f"target: {bits:.3f} bits per byte on held-out files, {target_seconds:.0f} s", flush=True)

    config = drafter_for(recipe.target, **recipe.drafter_sizes)
    draft_progress = Progress("drafter", recipe.drafter_steps)
    drafter = train_drafter(
        config, init_drafter(config, target, seed + 1), recipe.target, target, corpus.train,
        steps=recipe.drafter_steps, batch=recipe.drafter_batch, length=recipe.length, anchors=recipe.anchors, block_size=BLOCK,
        optimizer=adamw(schedule(recipe.drafter_lr, recipe.drafter_steps), 0.01), dtype=recipe.dtype,
        seed=seed + 1, progress=draft_progress,
    )  # fmt: skip
    save_drafter(out / "drafter", config, cast(drafter, "bfloat16"))
    report = {
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {sys.version.split()[0]}",
        "files": [corpus.num_train_files, corpus.num_held_out_files],
        "tokens": [len(corpus.train), len(corpus.held_out)],
        "recipe": dataclasses.asdict(recipe),
        "parameters": {"target": _count(target), "drafter": _count(drafter) - int(np.prod(target.lm_head.shape))},
        "target_bits_per_byte": {"train": progress.history[-1]["loss"] / np.log(2), "held_out": bits},
        "drafter": draft_progress.history[-1],
        "seconds": {"target": target_seconds, "drafter": time.monotonic() - started - target_seconds},
        "history": {"target": progress.history, "drafter": draft_progress.history},
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _count(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    sys.exit(main())
