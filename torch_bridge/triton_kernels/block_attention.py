"""Paged MLA attention, the context split among programs, then a merge of the splits in their order.

A row of a tile is one (query, head). How a request's context is split follows from its length and the page table's width, so a
request's bits do not depend on the others of the batch. Products are of the operands' dtype into fp32 sums; the softmax weights
are rounded to that dtype for the second product, and their sum is of the fp32 values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.checks import Layout, pool_dims

from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2
from .safety import clip

if TYPE_CHECKING:
    import torch

SPLITS = 64
"""The most programs that share one request's context."""


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q_latent, q_rope, keys, inside, best, total, sums,
    RANK: tl.constexpr, ROPE: tl.constexpr, SCALE: tl.constexpr, RANK_LANES: tl.constexpr, ROPE_LANES: tl.constexpr,
):  # fmt: skip
    """One tile of keys (`keys [BLOCK]`: where each begins) into the running maximum, sum and weighted sum of latents."""
    latent, turned = tl.arange(0, RANK_LANES), tl.arange(0, ROPE_LANES)
    k_latent = tl.load(keys[:, None] + latent[None, :], mask=inside[:, None] & (latent < RANK)[None, :], other=0.0)
    scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
    if ROPE > 0:
        k_rope = tl.load(keys[:, None] + RANK + turned[None, :], mask=inside[:, None] & (turned < ROPE)[None, :], other=0.0)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    scores = tl.where(inside[None, :], scores * SCALE, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(best - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * kept + tl.sum(weights, 1)
    sums = tl.dot(weights.to(k_latent.dtype), k_latent, sums * kept[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit
def context_kernel(  # type: ignore[no-untyped-def]
    query,  # [B, ROWS, RANK + ROPE], ROWS = block_size * heads
    block_latents,  # [B, BLOCK_SIZE, RANK + ROPE]
    pool,
    page_tables,  # [B, MAX_BLOCKS]
    advertised,  # [B]
    layer,  # [1]: in memory, so that all layers share one compiled kernel
    partial,  # [B, SPLITS, ROWS, RANK] fp32 out: weighted sums
    stats,  # [B, SPLITS, ROWS, 2] fp32 out: highest score, sum of the weights
    ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MAX_BLOCKS: tl.constexpr, NUM_PAGES: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr,
    ROW_LANES: tl.constexpr, RANK_LANES: tl.constexpr, ROPE_LANES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Program (row tile, split, request): its share of the context; the first split also takes the block's own latents."""
    split, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    width = RANK + ROPE
    row = tl.program_id(0) * ROW_LANES + tl.arange(0, ROW_LANES)
    latent, turned = tl.arange(0, RANK_LANES), tl.arange(0, ROPE_LANES)
    q = query + (b * ROWS + row)[:, None] * width
    q_latent = tl.load(q + latent[None, :], mask=(row < ROWS)[:, None] & (latent < RANK)[None, :], other=0.0)
    q_rope = tl.load(q + RANK + turned[None, :], mask=(row < ROWS)[:, None] & (turned < ROPE)[None, :], other=0.0)
    best = tl.full([ROW_LANES], float("-inf"), tl.float32)
    total = tl.zeros([ROW_LANES], tl.float32)
    sums = tl.zeros([ROW_LANES, RANK_LANES], tl.float32)

    length = clip(tl.load(advertised + b), 0, MAX_BLOCKS * PAGE_SIZE).to(tl.int32)
    tiles = tl.cdiv(length, KEYS)
    share = tl.cdiv(tiles, SPLITS)
    in_layer = pool + tl.load(layer).to(tl.int64) * LAYER_STRIDE
    for tile in range(split * share, tl.minimum(split * share + share, tiles)):
        position = tile * KEYS + tl.arange(0, KEYS)
        page = tl.load(page_tables + b * MAX_BLOCKS + position // PAGE_SIZE, mask=position < length, other=-1).to(tl.int64)
        keys = in_layer + page * PAGE_STRIDE + position % PAGE_SIZE * width
        inside = (page >= 0) & (page < NUM_PAGES)
        best, total, sums = attend(q_latent, q_rope, keys, inside, best, total, sums, RANK, ROPE, SCALE, RANK_LANES, ROPE_LANES)
    if split == 0:
        for first in tl.static_range(0, BLOCK_SIZE, KEYS):
            j = first + tl.arange(0, KEYS)
            keys = block_latents + (b * BLOCK_SIZE + j) * width
            best, total, sums = attend(
                q_latent, q_rope, keys, j < BLOCK_SIZE, best, total, sums, RANK, ROPE, SCALE, RANK_LANES, ROPE_LANES
            )

    place = (b * SPLITS + split) * ROWS + row
    tl.store(stats + place * 2, best, mask=row < ROWS)
    tl.store(stats + place * 2 + 1, total, mask=row < ROWS)
    if (split == 0) | (split * share < tiles):
        inside = (row < ROWS)[:, None] & (latent < RANK)[None, :]
        tl.store(partial + place[:, None] * RANK + latent[None, :], sums, mask=inside)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    partial,  # [B, SPLITS, ROWS, RANK] fp32
    stats,  # [B, SPLITS, ROWS, 2] fp32
    attended,  # [B, ROWS, RANK] out
    ROWS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, RANK_LANES: tl.constexpr, SPLIT_LANES: tl.constexpr,
):  # fmt: skip
    """Program (row, request): its splits, first to last. A split without a visible key has a sum of 0 and wrote no latents."""
    row, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    latent, split = tl.arange(0, RANK_LANES), tl.arange(0, SPLIT_LANES)
    of_split = stats + ((b * SPLITS + split) * ROWS + row) * 2
    highest = tl.max(tl.load(of_split, mask=split < SPLITS, other=float("-inf")))
    total = tl.zeros([RANK_LANES], tl.float32)  # the same number in every lane, and so is a split's share of it
    sums = tl.zeros([RANK_LANES], tl.float32)
    for s in tl.static_range(SPLITS):
        place = (b * SPLITS + s) * ROWS + row
        share = tl.zeros([RANK_LANES], tl.float32) + tl.load(stats + place * 2 + 1)
        weight = tl.exp2(tl.load(stats + place * 2) - highest)
        values = tl.load(partial + place * RANK + latent, mask=(latent < RANK) & (share != 0.0), other=0.0)
        total += weight * share
        sums += weight * values
    normal = tl.math.div_rn(sums, total)
    tl.store(attended + (b * ROWS + row) * RANK + latent, normal.to(attended.dtype.element_ty), mask=latent < RANK)


def _launches(query: Any, pool: Any, page_tables: Any, scale: float, rank: int, layout: Layout) -> tuple[Launch, Launch]:
    num_gen, block_size, heads, width = query.shape
    num_layers, num_pages, page_size, _ = pool_dims("block_attention", pool, layout)
    page, max_blocks, rows = page_size * width, page_tables.shape[1], block_size * heads
    row_lanes, keys = (64, 32) if query.dtype.itemsize == 2 else (16, 16)
    rank_lanes = max(16, power_of_2(rank))
    splits = min(SPLITS, triton.cdiv(max_blocks * page_size, keys))
    common = {"ROWS": rows, "RANK": rank, "SPLITS": splits, "RANK_LANES": rank_lanes}
    constexprs = common | {
        "ROPE": width - rank,
        "BLOCK_SIZE": block_size,
        "PAGE_SIZE": page_size,
        "MAX_BLOCKS": max_blocks,
        "NUM_PAGES": num_pages,
        "PAGE_STRIDE": page if layout == "layer_major" else num_layers * page,
        "LAYER_STRIDE": num_pages * page if layout == "layer_major" else page,
        "SCALE": float(np.float32(scale * math.log2(math.e))),
        "ROW_LANES": row_lanes,
        "ROPE_LANES": max(16, power_of_2(width - rank)),
        "KEYS": keys,
    }
    grid = (triton.cdiv(rows, row_lanes), splits, num_gen)
    return (
        Launch(grid, constexprs, num_warps=8, num_stages=2),
        Launch((rows, num_gen), common | {"SPLIT_LANES": power_of_2(splits)}),
    )


def block_attention(
    query: torch.Tensor,
    block_latents: torch.Tensor,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    advertised: torch.Tensor,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Absorbed MLA attention over the stored context and the whole block, two launches; see `jdspark.ops.block_attention`."""
    import torch

    contracts.block_attention(query, block_latents, pool, page_tables, advertised, layer, kv_lora_rank, layout)

    num_gen, block_size, heads, _ = query.shape
    rows = block_size * heads
    attend_launch, merge_launch = _launches(query, pool, page_tables, scale, kv_lora_rank, layout)
    splits = attend_launch.constexprs["SPLITS"]
    partial = torch.empty((num_gen, splits, rows, kv_lora_rank), dtype=torch.float32, device=query.device)
    stats = torch.empty((num_gen, splits, rows, 2), dtype=torch.float32, device=query.device)
    attended = query.new_empty((num_gen, block_size, heads, kv_lora_rank))
    number = torch.full((1,), layer, dtype=torch.int32, device=query.device)
    inputs = [pinned(x) for x in (query, block_latents, pool, page_tables, advertised)]
    launch_in_torch(context_kernel, [*inputs, number, partial, stats], attend_launch)
    launch_in_torch(merge_kernel, [partial, stats, attended], merge_launch)
    return attended


def block_attention_in_jax(
    query: jax.Array,
    block_latents: jax.Array,
    pool: jax.Array,
    page_tables: jax.Array,
    advertised: jax.Array,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout = "layer_major",
) -> jax.Array:
    """See `jdspark.ops.block_attention`."""
    num_gen, block_size, heads, _ = query.shape
    output = jax.ShapeDtypeStruct((num_gen, block_size, heads, kv_lora_rank), query.dtype)
    if output.size == 0:
        return jnp.zeros(output.shape, output.dtype)
    rows = block_size * heads
    attend_launch, merge_launch = _launches(query, pool, page_tables, scale, kv_lora_rank, layout)
    splits = attend_launch.constexprs["SPLITS"]
    sums = jax.ShapeDtypeStruct((num_gen, splits, rows, kv_lora_rank), jnp.float32)
    stats = jax.ShapeDtypeStruct((num_gen, splits, rows, 2), jnp.float32)
    inputs = [jnp.asarray(x) for x in (query, block_latents, pool, page_tables, advertised)]
    number = jnp.full((1,), layer, jnp.int32)
    partials = launch_in_jax(context_kernel, [*inputs, number], [sums, stats], attend_launch)
    return launch_in_jax(merge_kernel, partials, [output], merge_launch)[0]
