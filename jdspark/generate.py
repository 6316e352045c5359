"""`jdspark generate`: text from the shipped pair, with or without drafting, and what the drafts were worth."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .byte_lm import START, decode, encode
from .config import StepOptions
from .engine import Engine, RequestResult, pooled_acceptance
from .lossless import first_difference
from .ops.backends import why_unavailable
from .pretrained import FOLDER, Pair, load_pair
from .sampling import SamplingParams

LONG_RUN = 512
"""New tokens from which on a progress bar is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `jdspark generate`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; without one, --file or standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from this file")
    parser.add_argument(
        "--batch",
        action="store_true",
        help="many prompts at once: all PROMPTs, or one per line of --file or standard input (\\n for a newline, \\\\ for \\)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="bytes per prompt (default 256)")
    parser.add_argument("--compare", action="store_true", help="decode without drafting, too, and compare text, steps and time")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw acceptance by position")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest; 0 is all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest that make up this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next ones count up")
    parser.add_argument(
        "--pair", type=Path, default=FOLDER, help="folder with target/ and drafter/ (default: the shipped pair)"
    )
    parser.add_argument("--drafts", type=int, default=7, help="drafts per step, 1..7 (default 7)")
    parser.add_argument("--max-batch", type=int, default=8, help="prompts decoded at the same time (default 8)")
    parser.add_argument("--layout", choices=("layer_major", "page_major"), default="layer_major", help="of the latent pool")
    parser.add_argument(
        "--backend",
        choices=("auto", "xla", "pallas", "triton"),
        default="auto",
        help="of the decode step; pallas without a GPU is interpreted: many seconds a step",
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts that the arguments name. Raises ValueError for none, an empty one, or several without `--batch`."""
    if args.prompts and args.file:
        raise ValueError("a PROMPT and --file are both given: which one is meant?")
    if args.prompts:
        prompts = list(args.prompts)
    else:
        text = _read_text(args.file)
        prompts = [_unescaped(line) for line in re.split(r"\r?\n", text) if line] if args.batch else [text]
    if len(prompts) > 1 and not args.batch:
        raise ValueError(f"{len(prompts)} prompts: quote a prompt with spaces, or decode several at once with --batch")
    if not prompts or not all(prompts):
        raise ValueError("the prompt is empty")
    for number, prompt in enumerate(prompts, 1):
        try:
            prompt.encode()
        except UnicodeEncodeError:  # other bytes in an argument become lone surrogates
            raise ValueError(f"prompt {number} of {len(prompts)} is not UTF-8") from None
    return prompts


def _read_text(file: Path | None) -> str:
    """A file, or standard input, byte for byte (so a line may end in CR LF). Raises ValueError if it is not UTF-8."""
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("no prompt: pass one, or --file, or pipe it in")
    content = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        source = "standard input" if file is None else f"--file {file}"
        raise ValueError(f"{source} is not UTF-8: byte {content[error.start]:#x} at position {error.start}") from None


def _unescaped(line: str) -> str:
    """A line of `--batch` as a prompt; a backslash before another character is one (`\\d`)."""
    return re.sub(r"\\([n\\])", lambda escape: "\n" if escape[1] == "n" else "\\", line)


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of decoding all prompts."""

    results: list[RequestResult]
    decode_steps: int
    seconds: float
    """Prefill and decoding, everything compiled before."""
    compile_seconds: float


class Decoding:
    """Decodes prompts with one engine, first for compilation and then for time. Raises ValueError for a bad `--seed` etc."""

    def __init__(self, pair: Pair, args: argparse.Namespace, prompts: Sequence[str]):
        self.pair, self.args = pair, args
        self.prompts = [encode(prompt) for prompt in prompts]
        self.max_len = max(map(len, self.prompts)) + args.max_new_tokens
        self.sampling = [
            SamplingParams(args.temperature, args.top_k, args.top_p, args.seed + number) for number in range(len(prompts))
        ]

    def engine(self, *, num_drafts: int, drafting: bool) -> Engine:
        """An engine for these prompts, with pages for `--max-batch` of them."""
        return Engine(
            self.pair.target, self.pair.config, self.pair.params,
            max_batch=min(self.args.max_batch, len(self.prompts)), max_len=self.max_len, layout=self.args.layout,
            num_drafts=num_drafts, drafting=drafting, options=StepOptions.from_env(backend=self.args.backend),
        )  # fmt: skip

    def run(self, *, num_drafts: int, drafting: bool = True, show: Any = None) -> Run:
        """Decode every prompt; `show(request number, tokens)` is called as tokens come."""
        engine = self.engine(num_drafts=num_drafts, drafting=drafting)
        started = time.perf_counter()
        self._compile(engine)
        compiled = time.perf_counter()
        steps_before = engine.decode_steps
        results = self._decode(engine, self.args.max_new_tokens, show)
        ended = time.perf_counter()
        return Run(results, engine.decode_steps - steps_before, ended - compiled, compiled - started)

    def _compile(self, engine: Engine) -> None:
        """Two steps in every batch size, since a batch shrinks as its requests end, and the prefill of every prompt."""
        widest = engine.geometry.max_batch
        for size in (widest, *(1 << power for power in reversed(range((widest - 1).bit_length())))):
            for _ in range(size):  # all alike, so they end in the same step
                tokens = min(2 + engine.num_drafts, self.args.max_new_tokens)
                engine.submit([START], max_new_tokens=tokens, sampling=self.sampling[0])
            engine.run()
        self._decode(engine, 1, None)

    def _decode(self, engine: Engine, max_new_tokens: int, show: Any) -> list[RequestResult]:
        for number, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True)):
            engine.submit(prompt, max_new_tokens=max_new_tokens, stop_tokens=[START], sampling=sampling, request_id=number)
        for request_id, tokens in engine.stream():
            if show is not None:
                show(request_id, tokens)
        return [engine.result(number) for number in range(len(self.prompts))]


def summarize(args: argparse.Namespace, prompts: Sequence[str], run: Run) -> dict[str, Any]:
    """The figures of a run: totals over all prompts, and one entry per prompt."""
    acceptance_length, by_position = pooled_acceptance(run.results)
    return {
        "requests": [
            {
                "prompt": prompt,
                "text": decode(result.tokens).decode(errors="replace"),
                "tokens": len(result.tokens),
                "steps": result.steps,
                "acceptance_length": result.acceptance_length,
                "finish_reason": result.finish_reason,
            }
            for prompt, result in zip(prompts, run.results, strict=True)
        ],
        "tokens": sum(len(result.tokens) for result in run.results),
        "acceptance_length": acceptance_length,
        "acceptance_by_position": list(by_position),
        "steps": run.decode_steps,
        "seconds": run.seconds,
        "compile_seconds": run.compile_seconds,
        "sampling": {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")},
    }


def compare(decoding: Decoding, run: Run) -> dict[str, Any]:
    """Decode without drafting: in the target's verify shape for the text, one token at a time for the time."""
    same_shape = decoding.run(num_drafts=decoding.args.drafts, drafting=False)
    plain = decoding.run(num_drafts=0, drafting=False)
    differences = [
        first_difference(decoding.pair.target, prompt, ours.tokens, other.tokens)
        for prompt, ours, other in zip(decoding.prompts, run.results, plain.results, strict=True)
    ]
    return {
        "identical": all(a.tokens == b.tokens for a, b in zip(run.results, same_shape.results, strict=True)),
        "steps_without_drafting": same_shape.decode_steps,
        "seconds_without_drafting": plain.seconds,
        "speedup_in_steps": same_shape.decode_steps / run.decode_steps if run.decode_steps else 1.0,
        "speedup_in_time": plain.seconds / run.seconds,
        "first_differences_from_one_token_decoding": differences,
    }


def check_plot(path: Path) -> None:
    """Raise ValueError, before anything is decoded, if no chart can be written to this file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install -e '.[cli]'") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds or not path.parent.is_dir():
        raise ValueError(f"--plot {path}: expected a file in an existing folder that ends in one of {', '.join(sorted(kinds))}")


def plot(path: Path, figures: dict[str, Any]) -> None:
    """A bar chart of acceptance by position."""
    from matplotlib.figure import Figure

    shares = figures["acceptance_by_position"]
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(range(1, len(shares) + 1), shares, color="#3b6ea5")
    axes.bar_label(bars, [f"{share:.0%}" for share in shares])
    axes.set(xlabel="draft position", ylabel="share of steps that accept it", ylim=(0, 1.1))
    axes.set_title(f"{figures['acceptance_length']:.2f} tokens per step")
    figure.savefig(path, dpi=150)


def print_figures(figures: dict[str, Any]) -> None:
    """The figures as a reader wants them, below the text."""
    by_position = "  ".join(f"{share:.0%}" for share in figures["acceptance_by_position"])
    rate = figures["tokens"] / figures["seconds"]
    print(f"{figures['acceptance_length']:.2f} tokens per step; drafts accepted by position: {by_position}")
    print(f"{figures['tokens']} tokens in {figures['steps']} steps, {figures['seconds']:.2f} s ({rate:.0f} per second),"
          f" after {figures['compile_seconds']:.1f} s of compilation")  # fmt: skip
    if "identical" not in figures:
        return
    verdict = "identical" if figures["identical"] else "DIFFERENT"
    print(f"without drafting: text {verdict}; {figures['speedup_in_steps']:.2f}x fewer steps with drafting"
          f" ({figures['steps']} instead of {figures['steps_without_drafting']})")  # fmt: skip
    print(f"one token at a time: {figures['seconds_without_drafting']:.2f} s; drafting is"
          f" {figures['speedup_in_time']:.2f}x as fast")  # fmt: skip
    for number, difference in enumerate(figures["first_differences_from_one_token_decoding"]):
        if difference is not None:
            print(f"prompt {number}: one-token decoding differs from token {difference['token']} on, where the two best"
                  f" logits are {difference['logit_margin']:.1e} apart")  # fmt: skip


def run_generate(args: argparse.Namespace) -> int:
    """`jdspark generate`. Returns 1 if `--compare` found another text than the target's own."""
    if args.compare and args.temperature > 0:
        raise ValueError("--compare needs greedy decoding: with --temperature two runs draw different texts")
    if not 1 <= args.drafts <= 7:
        raise ValueError(f"--drafts is {args.drafts}, expected 1..7")
    if args.max_new_tokens < 1 or args.max_batch < 1:
        raise ValueError("--max-new-tokens and --max-batch must be at least 1")
    reason = None if args.backend == "auto" else why_unavailable(args.backend)
    if reason is not None:
        raise ValueError(f"--backend {args.backend} is not available: {reason}")
    if args.plot is not None:
        check_plot(args.plot)
    prompts = read_prompts(args)
    pair = load_pair(args.pair)
    decoding = Decoding(pair, args, prompts)
    limit = pair.target.config.max_position_embeddings - args.drafts
    if decoding.max_len > limit:
        longest = decoding.max_len - args.max_new_tokens
        raise ValueError(
            f"the longest prompt has {longest} tokens: with --max-new-tokens {args.max_new_tokens} that is {decoding.max_len},"
            f" the target has room for {limit}"
        )
    streams = len(prompts) == 1 and not args.json
    if streams:
        print(prompts[0], end="", flush=True)
    run = _run_shown(decoding, streams)
    figures = summarize(args, prompts, run)
    if args.compare:
        figures |= compare(decoding, run)
    if args.plot is not None:
        plot(args.plot, figures)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        if not streams:
            for request in figures["requests"]:
                print(f"{request['prompt']}{request['text']}\n[{request['acceptance_length']:.2f} tokens per step]\n")
        print("\n" * streams + "-" * 72)
        print_figures(figures)
    return 0 if figures.get("identical", True) else 1


def _run_shown(decoding: Decoding, streams: bool) -> Run:
    """Decode with drafting, streaming the text or, on long runs, with a progress bar on the terminal's error stream."""
    args = decoding.args
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if streams:
        run = decoding.run(
            num_drafts=args.drafts, show=lambda _, tokens: print(decoder.decode(decode(tokens)), end="", flush=True)
        )
        print(decoder.decode(b"", final=True), end="")  # a character that was cut
        return run
    total = args.max_new_tokens * len(decoding.prompts)
    if total < LONG_RUN or not sys.stderr.isatty():
        return decoding.run(num_drafts=args.drafts)
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:  # the bar is a convenience of the [cli] extra
        return decoding.run(num_drafts=args.drafts)

    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True)) as progress:  # fmt: skip
        task = progress.add_task("tokens", total=total)
        return decoding.run(num_drafts=args.drafts, show=lambda _, tokens: progress.advance(task, len(tokens)))
