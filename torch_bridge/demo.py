"""`python -m torch_bridge.demo`: a checkpoint, a prompt, decode steps as one jitted function, compared with torch.

Writes a small random drafter in the published layout (all of Kimi K3's ratios that matter to the cache kept: latents of
512 + 64, pages of 32, blocks of 7, 5 layers), loads it like any other, and runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jdspark import Geometry, StepInputs, init_state, load_drafter, make_decode_step, save_drafter
from jdspark.presets import SMALL_K3, random_drafter
from jdspark.state import DecodeState

from .parity import Row, parity_ok, print_report, report_console, run_parity
from .whole_step import ScriptedTarget, compare_steps


def scratch_bytes(params: Any, geometry: Geometry, state: DecodeState, inputs: StepInputs) -> int:
    """Scratch memory of the compiled step, from XLA's memory analysis. Compiles, but neither runs nor allocates a pool."""
    abstract = jax.eval_shape(lambda: init_state(state.config, geometry, dtype=state.pool.dtype))
    compiled = make_decode_step(state.config, geometry).lower(params, abstract, inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def step_table(rows: Sequence[Row]) -> Table:
    """The whole step's outputs, one line each."""
    table = Table("step output", "comparison", "agreed", "worst seen", title="the whole step, JAX against torch")
    for row in rows:
        how = "bitwise" if row.bound is None else f"max|a-b|/max|b| <= {row.bound:.2e}"
        worst = "" if row.bound is None else f"{row.worst:.2e}"
        table.add_row(row.op, how, f"{row.passed}/{row.cases}", worst)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_bridge.demo", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo_checkpoint"), help="folder to write and load")
    parser.add_argument("--steps", type=int, default=20, help="decode steps to run and compare (default 20)")
    parser.add_argument("--cases", type=int, default=32, help="random cases per op in the parity table (default 32)")
    parser.add_argument("--layout", choices=("layer_major", "page_major"), default="layer_major")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.cases < 1:
        parser.error("--steps and --cases must be at least 1")
    console = report_console()
    started = time.perf_counter()

    save_drafter(args.checkpoint, SMALL_K3, random_drafter(SMALL_K3, seed=0, lm_head=False))
    config, params = load_drafter(args.checkpoint)
    params = params.with_lm_head(random_drafter(config, seed=1).lm_head)  # the head is the target's; here a random one
    console.print(
        f"[bold]drafter[/bold] {args.checkpoint}: {config.num_hidden_layers} layers, latent {config.kv_lora_rank} +"
        f" {config.qk_rope_head_dim}, Markov rank {config.markov_rank}, {params.kv_a_proj.dtype}, on {jax.devices()[0]}"
    )
    geometry = Geometry(
        max_batch=4, max_draft_len=7, page_size=32, num_pages=64, max_blocks_per_seq=12, max_ctx=360, layout=args.layout,
        offset_divisor=2,
    )  # fmt: skip

    with console.status("prefill and decode steps, each compared with the torch twin"):
        report = compare_steps(config, params, geometry, num_steps=args.steps, prompt_lens=(75, 40), dummy_rows=1)
    per_step = np.array(report.accepted)[:, :2]
    console.print(f"[bold]prefill[/bold] prompts of 75 and 40 tokens, in two chunks each, into {args.layout} pages of 32")
    console.print(
        f"[bold]decode[/bold] {args.steps} steps of 2 requests and a padding row: {per_step.mean():.2f} tokens accepted per"
        f" step and request (scripted target), contexts now {np.asarray(report.state.ctx_len)[:2].tolist()}"
    )
    target = ScriptedTarget(config, geometry, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, geometry.dummy_slot])
    larger = dataclasses.replace(geometry, num_pages=8 * geometry.num_pages)
    scratch, scratch_of_larger = (scratch_bytes(params, g, report.state, inputs) for g in (geometry, larger))
    in_place = scratch == scratch_of_larger  # a copy of the pool would grow with it
    console.print(
        f"[bold]jit[/bold] {report.step.compilations} compilation for all of them; scratch {scratch / 1e6:.1f} MB, with a"
        f" pool 8 times as large {scratch_of_larger / 1e6:.1f} MB: the pool is {'not ' if in_place else ''}copied"
    )
    console.print(step_table([*report.exact_rows, *report.bounded_rows]))
    for row in [*report.exact_rows, *report.bounded_rows]:
        for failure in row.failures[:3]:
            console.print(f"MISMATCH {row.op}: {failure}", style="red", markup=False)

    with console.status("every op on random cases"):
        exact_rows, bounded_rows = run_parity(None, args.cases, 0, "cpu", backends=["torch eager"])
    print_report(console, exact_rows, bounded_rows)
    console.print(f"{time.perf_counter() - started:.0f} s")
    compiled_once = report.step.compilations == 1
    return 0 if report.agreed and in_place and compiled_once and parity_ok(exact_rows, bounded_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
