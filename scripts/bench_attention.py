"""Device time of one layer's block attention against the copy bandwidth and torch's best, in one run on a GPU.

`python scripts/bench_attention.py [--json FILE]`: K3 rank shapes, every page somewhere else, and enough page tables that no
context is still in the cache. Times are those of all kernels of a call, torch's as well, from one profiler's traces; bytes are
`advertised * D * 2` of all requests, the copy counts what it reads and what it writes. torch gets the context gathered; the
gather is timed by itself.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from jdspark import ops
from jdspark.bench.clock import Deadline, compile_all, describe, or_raise
from jdspark.bench.floors import copy_bandwidth
from jdspark.bench.profile import Segment, profile_calls
from torch_bridge import to_torch

HEADS, BLOCK, WIDTH, RANK, PAGE, LAYERS, LAYER, SCALE = 8, 7, 576, 512, 32, 2, 1, 0.07
CASES = {
    "B=1, 2K": [2048],
    "B=1, 32K": [32768],
    "B=1, 64K": [65536],
    "B=1, 128K": [131072],
    "B=1, 393K": [393216],
    "B=8, 2K": [2048] * 8,
    "B=8, 64K": [65536] * 8,
    "B=8, 100 to 393K": [393216, 100, 2048, 65536, 500, 131072, 32768, 8192],
    "B=64, 8K": [8192] * 64,
}
TARGETS = {"B=1, 64K": 65, "B=1, 128K": 75, "B=1, 393K": 75, "B=8, 64K": 75}
"""Percent of the copy bandwidth."""

CACHED = 200 << 20
"""Bytes that the timed calls walk through before a context comes again, where it is smaller."""

COPIED = 1 << 31
"""Bytes of the copy."""

GATHERED = 4
"""Contexts at most that torch's attentions take in turn."""


def wait(result: Any) -> None:
    """Until the device has done what JAX and torch were called for."""
    jax.block_until_ready(result)
    torch.cuda.synchronize()


def profiled(calls: Sequence[Callable[[int], Any]], repeat: int) -> list[Segment]:
    """The kernels of each call, made `repeat` times, in one trace; a call is given how often it has been made before."""
    runs = []
    for call in calls:
        for i in range(3):
            wait(call(i))
        count = itertools.count(3)
        runs.append(lambda call=call, count=count: call(next(count)))
    return profile_calls(runs, repeat, wait)


def kernel_us(segment: Segment, name: str) -> float:
    """Median microseconds of the kernel that has this in its name."""
    return statistics.median(event.duration_ns for event in segment.events if name in event.name) / 1e3


class Case:
    """The operands of one row of the table, and enough page tables to walk past the cache."""

    def __init__(self, advertised: list[int], seed: int):
        B, columns = len(advertised), -(-max(advertised) // PAGE) + 8
        num_tables = 1 + CACHED // (sum(advertised) * WIDTH * 2)
        num_pages = num_tables * B * columns
        keys = jax.random.split(jax.random.key(seed), 3)
        self.lengths = advertised
        self.query = jax.random.normal(keys[0], (B, BLOCK, HEADS, WIDTH), jnp.bfloat16)
        self.block_latents = jax.random.normal(keys[1], (B, BLOCK, WIDTH), jnp.bfloat16)
        self.pool = jax.random.normal(keys[2], (LAYERS, num_pages, PAGE, WIDTH), jnp.bfloat16)
        self.advertised = jnp.asarray(advertised, jnp.int32)
        tables = np.random.default_rng(seed).permutation(num_pages).reshape(num_tables, B, columns).astype(np.int32)
        self.tables = [jnp.asarray(table) for table in tables]

    def lowered(self) -> Any:
        def attention(query: Any, block_latents: Any, pool: Any, table: Any, advertised: Any) -> jax.Array:
            return ops.block_attention(
                query, block_latents, pool, table, advertised, layer=LAYER, scale=SCALE, kv_lora_rank=RANK, backend="pallas"
            )

        return jax.jit(attention).lower(*self.operands(0))

    def operands(self, i: int) -> tuple[jax.Array, ...]:
        return self.query, self.block_latents, self.pool, self.tables[i % len(self.tables)], self.advertised


def gather(pool: torch.Tensor, tables: torch.Tensor, block_latents: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[B, tokens + block, D]`, contexts of one length laid end to end, the block behind them."""
    context = pool[LAYER][tables[:, : -(-tokens // PAGE)].long()].flatten(1, 2)[:, :tokens]
    return torch.cat([context, block_latents], dim=1)


def torch_attentions() -> dict[str, Callable[..., torch.Tensor]]:
    """Attention of queries `[B, rows, D]` over gathered keys `[B, tokens, D]`, as torch offers it; the slow to compile last."""

    def products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax((query @ keys.mT).float() * SCALE, dim=-1)
        return scores.to(keys.dtype) @ keys[..., :RANK]

    def sdpa(backend: SDPBackend, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query[:, None], keys[:, None], keys[:, None, :, :RANK], scale=SCALE)[:, 0]

    compiled_flex = torch.compile(flex_attention)

    def flex(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        values = keys[:, None, :, :RANK].contiguous()
        return compiled_flex(query[:, None], keys[:, None], values, scale=SCALE)[:, 0]

    backends = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    return {
        "two products": products,
        **{f"SDPA {name.lower()}": functools.partial(sdpa, getattr(SDPBackend, name)) for name in backends},
        "two products, compiled": torch.compile(products),
        "flex_attention, compiled": flex,
    }


def time_torch(case: Case, wanted: torch.Tensor, repeat: int, deadline: Deadline) -> dict[str, Any]:
    """Microseconds of the gather and of every attention that runs and is right; what does not run says why."""
    query, block_latents, pool = (to_torch(x) for x in (case.query, case.block_latents, case.pool))
    tables = [to_torch(table) for table in case.tables]
    rows, tokens = query.flatten(1, 2), case.lengths[0]
    keys = [gather(pool, table, block_latents, tokens) for table in tables[:GATHERED]]
    calls: dict[str, Callable[[int], Any]] = {"gather": lambda i: gather(pool, tables[i % len(tables)], block_latents, tokens)}
    refused = {}

    def turn(attention: Callable[..., torch.Tensor], i: int) -> torch.Tensor:
        return attention(rows, keys[i % len(keys)])

    for name, attention in torch_attentions().items():
        try:
            if not deadline.left():
                raise TimeoutError("the time limit left none for it")
            difference = (attention(rows, keys[0]).float() - wanted).abs().max() / wanted.abs().max()
        except Exception as error:  # a peer that cannot run these shapes is no reason to stop
            refused[name] = describe(error)
            continue
        if not difference <= 2.0**-6:
            raise RuntimeError(f"{name}: its output differs from the kernels' by {float(difference):.3g} of the largest value")
        calls[name] = functools.partial(turn, attention)
    times = {name: found.kernel_us(repeat) for name, found in zip(calls, profiled(list(calls.values()), repeat), strict=True)}
    return {"gather": times.pop("gather"), "attention": times, "not run": refused}


def bench(case: Case, compiled: Any, repeat: int, bandwidth: float, deadline: Deadline | None) -> dict[str, Any]:
    """One row: microseconds of both kernels, the bandwidth, and what torch needs where all contexts have one length."""
    (segment,) = profiled([lambda i: compiled(*case.operands(i))], repeat)
    if segment.launches(repeat) != 2:
        raise RuntimeError(f"a call has {segment.launches(repeat)} kernels and copies, expected the split and the merge alone")
    split, merge = (kernel_us(segment, name) for name in ("attention_split", "attention_merge"))
    moved = sum(case.lengths) * WIDTH * 2 / (split + merge)
    row: dict[str, Any] = {"split us": split, "merge us": merge, "TB/s": moved / 1e6, "of copy": moved / bandwidth}
    if deadline and len(set(case.lengths)) == 1:
        wanted = to_torch(compiled(*case.operands(0))).flatten(1, 2).float()
        row["torch"] = time_torch(case, wanted, repeat, deadline)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--cases", default=";".join(CASES), help="semicolon-separated (default: all)")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--no-peer", action="store_true", help="time only the Pallas kernels")
    parser.add_argument("--peer-seconds", type=float, default=40, help="start no torch attention after this (default: 40)")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        parser.error("no GPU visible to both JAX and torch: these would be times of an interpreter")
    names = args.cases.split(";")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases: unknown {', '.join(unknown)}; known: {'; '.join(CASES)}")
    deadline = None if args.no_peer else Deadline(args.peer_seconds)
    bandwidth = copy_bandwidth(COPIED) / 1e6
    cases = {name: Case(CASES[name], seed) for seed, name in enumerate(names)}
    compiled = compile_all({name: case.lowered for name, case in cases.items()})
    print(f"{jax.devices()[0].device_kind}: a copy moves {bandwidth / 1e6:.2f} TB/s, read and written")
    print(f"{'contexts':18}{'split us':>9}{'merge us':>9}{'TB/s':>7}{'of copy':>8}{'target':>7}   torch us (with gather)")
    report: dict[str, Any] = {"machine": jax.devices()[0].device_kind, "copy TB/s": bandwidth / 1e6, "cases": {}}
    for name in names:
        row = bench(cases.pop(name), or_raise(compiled[name]), args.repeat, bandwidth, deadline)
        peer = ""
        if times := row.get("torch", {}).get("attention"):
            best = min(times, key=times.__getitem__)
            peer = f"{times[best]:.1f} ({times[best] + row['torch']['gather']:.1f}), {best}"
        report["cases"][name] = row
        target = f"{TARGETS[name]}%" if name in TARGETS else ""
        print(
            f"{name:18}{row['split us']:9.1f}{row['merge us']:9.1f}{row['TB/s']:7.2f}{row['of copy']:8.1%}{target:>7}   {peer}",
            flush=True,
        )
        for attention, reason in row.get("torch", {}).get("not run", {}).items():
            print(f"{'':18}torch's {attention} did not run: {reason}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
