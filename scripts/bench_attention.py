"""Device time of one layer's block attention against the copy bandwidth and torch's best, in one run on a GPU.

`python scripts/bench_attention.py [--json FILE]`: K3 rank shapes, every page somewhere else, and enough page tables that no
context is still in the cache. Times are those of all kernels of a call, from profiles; bytes are `advertised * D * 2` of all
requests, the copy counts what it reads and what it writes. torch gets the context gathered; the gather is timed by itself.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.profiler import ProfileData
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from jdspark import ops
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


def copy_bandwidth(repeat: int) -> float:
    """Bytes per microsecond of a device-to-device copy of 2 GB, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / torch_time(lambda i: target.copy_(source), repeat)


def jax_times(call: Callable[[int], Any], repeat: int) -> dict[str, float]:
    """Median microseconds of each kernel of a call, launch gaps not counted."""
    for i in range(3):
        jax.block_until_ready(call(i))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(repeat):
                result = call(i)
            jax.block_until_ready(result)
        (trace,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        times: dict[str, list[float]] = {}
        for plane in ProfileData.from_file(trace).planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            times.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return {name: statistics.median(found) * round(len(found) / repeat) for name, found in times.items()}


def torch_time(call: Callable[[int], Any], repeat: int) -> float:
    """Mean microseconds of all kernels of a call, launch gaps not counted."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(repeat):
            call(i)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / repeat


def draw(advertised: list[int], seed: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Operands without their page tables, and page tables."""
    B, columns = len(advertised), -(-max(advertised) // PAGE) + 8
    num_tables = 1 + CACHED // (sum(advertised) * WIDTH * 2)
    num_pages = num_tables * B * columns
    keys = jax.random.split(jax.random.key(seed), 3)
    pool = jax.random.normal(keys[0], (LAYERS, num_pages, PAGE, WIDTH), jnp.bfloat16)
    query = jax.random.normal(keys[1], (B, BLOCK, HEADS, WIDTH), jnp.bfloat16)
    block_latents = jax.random.normal(keys[2], (B, BLOCK, WIDTH), jnp.bfloat16)
    tables = np.random.default_rng(seed).permutation(num_pages).reshape(num_tables, B, columns).astype(np.int32)
    return [query, block_latents, pool, jnp.asarray(advertised, jnp.int32)], [jnp.asarray(table) for table in tables]


def gather(pool: torch.Tensor, tables: torch.Tensor, block_latents: torch.Tensor, tokens: int) -> torch.Tensor:
    """`[B, tokens + block, D]`, contexts of one length laid end to end, the block behind them."""
    context = pool[LAYER][tables[:, : -(-tokens // PAGE)].long()].flatten(1, 2)[:, :tokens]
    return torch.cat([context, block_latents], dim=1)


def torch_attentions() -> dict[str, Callable[..., torch.Tensor]]:
    """Attention of queries `[B, rows, D]` over gathered keys `[B, tokens, D]`, as torch offers it."""

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
        "two products, compiled": torch.compile(products),
        "flex_attention, compiled": flex,
        **{f"SDPA {name.lower()}": functools.partial(sdpa, getattr(SDPBackend, name)) for name in backends},
    }


def time_torch(
    operands: list[jax.Array], tables: list[jax.Array], tokens: int, wanted: torch.Tensor, repeat: int
) -> dict[str, Any]:
    """Microseconds of the gather and of every attention that runs and is right; what does not run says why."""
    query, block_latents, pool = (to_torch(x) for x in operands[:3])
    torch_tables = [to_torch(table) for table in tables]
    rows = query.flatten(1, 2)
    keys = [gather(pool, table, block_latents, tokens) for table in torch_tables[:4]]
    report: dict[str, Any] = {
        "gather": torch_time(lambda i: gather(pool, torch_tables[i % len(tables)], block_latents, tokens), repeat),
        "attention": {},
        "not run": {},
    }
    for name, attention in torch_attentions().items():
        try:
            difference = (attention(rows, keys[0]).float() - wanted).abs().max() / wanted.abs().max()
            if not difference <= 2.0**-6:
                raise ValueError(f"its output differs by {float(difference):.3g} of the largest value")
            report["attention"][name] = torch_time(lambda i, attention=attention: attention(rows, keys[i % len(keys)]), repeat)
        except Exception as error:  # a peer that cannot run these shapes is no reason to stop
            report["not run"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return report


def bench(advertised: list[int], seed: int, repeat: int, bandwidth: float, peer: bool) -> dict[str, Any]:
    """One case: microseconds of each kernel, the bandwidth, and what torch needs where all contexts have one length."""
    operands, tables = draw(advertised, seed)

    @jax.jit
    def attention(query: Any, block_latents: Any, pool: Any, advertised: Any, table: Any) -> jax.Array:
        return ops.block_attention(
            query, block_latents, pool, table, advertised, layer=LAYER, scale=SCALE, kv_lora_rank=RANK, backend="pallas"
        )

    kernels = jax_times(lambda i: attention(*operands, tables[i % len(tables)]), repeat)
    split = sum(time for kernel, time in kernels.items() if "attention_split" in kernel)
    total = sum(kernels.values())
    moved = sum(advertised) * WIDTH * 2 / total
    row: dict[str, Any] = {"split us": split, "merge us": total - split, "TB/s": moved / 1e6, "of copy": moved / bandwidth}
    if peer and len(set(advertised)) == 1:
        wanted = to_torch(attention(*operands, tables[0])).flatten(1, 2).float()
        row["torch"] = time_torch(operands, tables, advertised[0], wanted, repeat)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--cases", default=";".join(CASES), help="semicolon-separated (default: all)")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--no-peer", action="store_true", help="time only the Pallas kernels")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        parser.error("no GPU visible to both JAX and torch: these would be times of an interpreter")
    names = args.cases.split(";")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases: unknown {', '.join(unknown)}; known: {'; '.join(CASES)}")
    bandwidth = copy_bandwidth(args.repeat)
    torch.cuda.empty_cache()
    print(f"{jax.devices()[0].device_kind}: a copy moves {bandwidth / 1e6:.2f} TB/s, read and written")
    print(f"{'contexts':18}{'split us':>9}{'merge us':>9}{'TB/s':>7}{'of copy':>8}{'target':>7}   torch us (with gather)")
    report: dict[str, Any] = {"machine": jax.devices()[0].device_kind, "copy TB/s": bandwidth / 1e6, "cases": {}}
    for seed, name in enumerate(names):
        row = bench(CASES[name], seed, args.repeat, bandwidth, not args.no_peer)
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
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
