"""`jdspark lossless`: on prompts from held-out source files, greedy text with drafting is the target's own, token for token.

The target decodes without drafts in the same verify shape, because a GEMM of another shape rounds differently. What plain
one-token decoding does instead is reported beside it: the first difference, and the target's logit margin there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .byte_lm import START, ByteTarget, encode
from .config import DrafterConfig, StepOptions
from .engine import Engine, RequestResult, pooled_acceptance
from .ops.checks import Layout
from .params import DrafterParams
from .presets import random_drafter
from .pretrained import FOLDER, Pair, load_pair
from .train.corpus import is_held_out, source_files, standard_library


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an engine decodes."""

    batch: int
    layout: Layout = "layer_major"
    prefill_chunk: int = 1024
    backend: str = "xla"
    drafter: str = "shipped"
    """`shipped`, or `random` weights of the same shapes."""

    def __str__(self) -> str:
        prefill = "whole prefill" if self.prefill_chunk >= PROMPT_BYTES + 1 else f"prefill in chunks of {self.prefill_chunk}"
        return f"B {self.batch}, {prefill}, {self.layout}, {self.backend}, {self.drafter} drafter"


PROMPT_BYTES = 160
SETTINGS = (
    Setting(8),
    Setting(3, prefill_chunk=48),
    Setting(1, "page_major"),
    Setting(8, "page_major", prefill_chunk=48),
    Setting(8, drafter="random"),
)


@dataclasses.dataclass(frozen=True)
class Report:
    """One setting's outcome over all prompts."""

    setting: Setting
    prompts: int
    identical: int
    tokens: int
    acceptance_length: float
    """Tokens per step and request, without the first token, which the prompt gives."""
    acceptance_by_position: tuple[float, ...]
    steps: int
    steps_without_drafting: int
    one_token_differences: tuple[dict[str, Any], ...]
    """Prompts on which plain one-token decoding gives another text."""


def held_out_prompts(count: int, folder: Path | None = None, seed: int = 0) -> list[bytes]:
    """`count` passages of `PROMPT_BYTES` bytes from held-out source files, each from a line's start.

    Raises ValueError if the folder (the standard library by default) has no held-out files.
    """
    folder = standard_library() if folder is None else folder
    files = [file for file in source_files(folder) if is_held_out(file.relative_to(folder).as_posix())]
    texts = [text for text in (file.read_bytes() for file in files) if len(text) > 2 * PROMPT_BYTES]
    if not texts:
        raise ValueError(f"lossless: {folder} has no held-out *.py file of more than {2 * PROMPT_BYTES} bytes")
    rng = np.random.default_rng(seed)
    prompts = []
    for number in range(count):
        text = texts[number % len(texts)]
        at = text.rfind(b"\n", 0, rng.integers(1, len(text) - PROMPT_BYTES)) + 1
        prompts.append(text[at : at + PROMPT_BYTES])
    return prompts


def decode_all(
    pair: Pair,
    setting: Setting,
    prompts: Sequence[bytes],
    *,
    max_new_tokens: int,
    num_drafts: int,
    drafting: bool,
) -> tuple[list[RequestResult], int]:
    """Every prompt's greedy continuation, and the number of decode steps."""
    config, params = _drafter(pair, setting)
    engine = Engine(
        pair.target, config, params, max_batch=setting.batch, max_len=max(map(len, prompts)) + 1 + max_new_tokens,
        layout=setting.layout, num_drafts=num_drafts, drafting=drafting, prefill_chunk=setting.prefill_chunk,
        options=StepOptions(backend=setting.backend),  # type: ignore[arg-type]
    )  # fmt: skip
    for number, prompt in enumerate(prompts):
        engine.submit(encode(prompt), max_new_tokens=max_new_tokens, stop_tokens=[START], request_id=number)
    results = engine.run()
    return [results[number] for number in range(len(prompts))], engine.decode_steps


def _drafter(pair: Pair, setting: Setting) -> tuple[DrafterConfig, DrafterParams]:
    if setting.drafter == "shipped":
        return pair.config, pair.params
    params = random_drafter(pair.config, 0, dtype=str(pair.params.kv_a_proj.dtype), lm_head=False)
    return pair.config, params.with_lm_head(pair.target.lm_head)


def first_difference(
    target: ByteTarget, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]
) -> dict[str, Any] | None:
    """Where two greedy continuations part, and the target's logit margin there; None if they are the same."""
    if list(ours) == list(plain):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), min(len(ours), len(plain)))
    tokens = np.array([[*prompt, *ours[:at]]], np.int32)
    zero, length = np.zeros(1, np.int32), np.array([tokens.shape[1]], np.int32)
    logits, _, _ = target.prefill(target.init_cache(1, tokens.shape[1]), tokens, zero, length, zero)
    second, best = np.sort(np.asarray(logits[0]))[-2:]
    return {"token": at, "logit_margin": float(best - second)}


def check_setting(
    pair: Pair, setting: Setting, prompts: Sequence[bytes], *, max_new_tokens: int, num_drafts: int = 7
) -> Report:
    """Decode all prompts with drafting, without it in the same verify shape, and one token at a time."""

    def run(drafts: int, drafting: bool) -> tuple[list[RequestResult], int]:
        return decode_all(pair, setting, prompts, max_new_tokens=max_new_tokens, num_drafts=drafts, drafting=drafting)

    drafted, steps = run(num_drafts, True)
    own, own_steps = run(num_drafts, False)
    plain, _ = run(0, False)
    differences = [
        {"prompt": number, **difference}
        for number, (prompt, ours, other) in enumerate(zip(prompts, drafted, plain, strict=True))
        if (difference := first_difference(pair.target, encode(prompt), ours.tokens, other.tokens)) is not None
    ]
    acceptance_length, by_position = pooled_acceptance(drafted)
    return Report(
        setting=setting,
        prompts=len(prompts),
        identical=sum(a.tokens == b.tokens for a, b in zip(drafted, own, strict=True)),
        tokens=sum(len(result.tokens) for result in drafted),
        acceptance_length=acceptance_length,
        acceptance_by_position=by_position,
        steps=steps,
        steps_without_drafting=own_steps,
        one_token_differences=tuple(differences),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jdspark lossless`."""
    parser.add_argument("--prompts", type=int, default=200, help="prompts per setting (default 200)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="bytes per prompt (default 32)")
    parser.add_argument("--backend", default="xla", choices=("auto", "xla", "pallas", "triton"), help="of the decode step")
    parser.add_argument(
        "--pair", type=Path, default=FOLDER, help="folder with target/ and drafter/ (default: the shipped pair)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")


def run_lossless(args: argparse.Namespace) -> int:
    """`jdspark lossless`. Returns 1 if a text differs from the target's own."""
    if args.prompts < 1 or args.max_new_tokens < 2:
        raise ValueError("--prompts must be at least 1 and --max-new-tokens at least 2")
    if args.json is not None:
        args.json.touch()  # before minutes of decoding, not after them
    pair = load_pair(args.pair)
    prompts = held_out_prompts(args.prompts)
    reports = []
    for setting in SETTINGS:
        report = check_setting(
            pair, dataclasses.replace(setting, backend=args.backend), prompts, max_new_tokens=args.max_new_tokens
        )
        reports.append(report)
        by_position = " ".join(f"{share:.0%}" for share in report.acceptance_by_position)
        print(
            f"{report.setting}: {report.identical}/{report.prompts} texts identical; {report.acceptance_length:.2f} tokens per"
            f" step ({by_position}), {report.steps} steps instead of {report.steps_without_drafting};"
            f" {len(report.one_token_differences)} differ from one-token decoding", flush=True,
        )  # fmt: skip
        for difference in report.one_token_differences:
            at, margin = difference["token"], difference["logit_margin"]
            print(f"  prompt {difference['prompt']}: from token {at}, logit margin {margin:.1e}")
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=2) + "\n", encoding="utf-8")
    identical, total = sum(report.identical for report in reports), sum(report.prompts for report in reports)
    print(f"lossless: {identical}/{total} texts identical")
    return 0 if identical == total else 1
