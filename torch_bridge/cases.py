"""Random cases of every op, as NumPy operands: the case families a kernel or a chain has to survive.

A case is a pure function of (op, index, seed). Shapes come from a short list, so that compiled functions are reused;
values are drawn anew each time.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdspark.ops import BlockPlacement

BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The static sizes of a case, named as in the design."""

    B: int
    K: int
    block_size: int
    page_size: int
    max_blocks: int
    num_contexts: int
    layout: str
    dtype: np.dtype
    L: int = 3
    D: int = 24
    max_batch: int = 6
    num_pages: int = 24
    vocab: int = 97
    hidden: int = 40
    divisor: int = 2
    rank: int = 8
    """Of the Markov head."""


SHAPES = (
    BatchShape(4, 7, 7, 32, 72, 0, "layer_major", BFLOAT16, L=5, D=576),
    BatchShape(1, 7, 8, 32, 300, 1, "page_major", BFLOAT16),
    BatchShape(3, 3, 7, 64, 12300, 2, "layer_major", FLOAT32, divisor=10),
    BatchShape(5, 0, 4, 4, 12, 0, "page_major", FLOAT32, divisor=1),
    BatchShape(4, 2, 3, 4, 9, 1, "layer_major", BFLOAT16),
    BatchShape(2, 7, 7, 8, 16, 3, "page_major", BFLOAT16, L=2, D=576, vocab=1),
    BatchShape(6, 5, 6, 3, 7, 0, "page_major", FLOAT32, D=33, num_pages=11),
    BatchShape(4, 1, 1, 1, 5, 0, "layer_major", FLOAT32, L=1, D=5, divisor=3),
)

K3 = {"K": 7, "block_size": 7, "L": 5, "D": 576, "hidden": 7168, "num_pages": 160, "divisor": 10, "max_batch": 40, "rank": 256}
K3_SHAPES = (
    BatchShape(B=1, page_size=32, max_blocks=72, num_contexts=0, layout="layer_major", dtype=BFLOAT16, vocab=163840, **K3),
    BatchShape(B=4, page_size=32, max_blocks=264, num_contexts=1, layout="page_major", dtype=BFLOAT16, vocab=20480, **K3),
    BatchShape(B=32, page_size=32, max_blocks=136, num_contexts=0, layout="layer_major", dtype=BFLOAT16, vocab=20480, **K3),
    BatchShape(B=1, page_size=64, max_blocks=1032, num_contexts=0, layout="page_major", dtype=BFLOAT16, vocab=20480, **K3),
    BatchShape(B=4, page_size=32, max_blocks=12300, num_contexts=0, layout="layer_major", dtype=BFLOAT16, vocab=163840, **K3),
    BatchShape(B=1, page_size=32, max_blocks=12300, num_contexts=2, layout="layer_major", dtype=BFLOAT16, vocab=20480, **K3),
    BatchShape(B=32, page_size=32, max_blocks=2056, num_contexts=4, layout="page_major", dtype=BFLOAT16, vocab=20480, **K3),
)
"""One tensor-parallel rank of Kimi K3, contexts from 2K to 393K tokens. `hidden` and `vocab` are cut where only memory would
grow (see the ops' cases)."""

FAMILIES = (
    "plain",
    "max_ctx",
    "outrun",
    "holes",
    "dummies",
    "special",
    "strided",
    "hostile",
)
"""What is unusual about a case: contexts at the ceiling, contexts past their pages, holes in the table, rows sharing the
dummy slot, NaN / Inf / -0.0 / subnormal values and ties, strided torch tensors, device values out of range."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op."""

    op: str
    label: str
    """Family and shape, for a report."""
    operands: dict[str, Any]
    """NumPy arrays (or a BlockPlacement of them), by argument name."""
    static: dict[str, Any]
    dtype: str
    """Of the floats: `float32` or `bfloat16`."""
    strided: bool = False
    bound: float | None = None
    """None: every backend must give the same bits. Else the largest allowed `max|a - b| / max|b|` of its float outputs."""


def specials(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """The array with a few NaNs of both signs, infinities, signed zeros and subnormals strewn in, in place."""
    tiny = np.array([1e-40, -1e-40]).astype(values.dtype)
    chosen = np.concatenate([np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]).astype(values.dtype), tiny])
    count = max(1, values.size // 8)
    values.reshape(-1)[rng.integers(0, values.size, count)] = rng.choice(chosen, count)
    return values


def normal(rng: np.random.Generator, *shape: int, dtype: Any = FLOAT32) -> np.ndarray:
    """Standard normal values in any float dtype."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def int32(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.int32)


@dataclasses.dataclass
class Batch:
    """The integer side of a step, drawn for a shape and a family."""

    shape: BatchShape
    family: str
    max_ctx: int
    ctx_len: np.ndarray
    slots: np.ndarray
    num_accepted: np.ndarray
    accepted_tokens: np.ndarray
    block_tables: np.ndarray
    block_counts: np.ndarray
    encoded_offsets: np.ndarray


def draw_batch(rng: np.random.Generator, shape: BatchShape, family: str) -> Batch:
    """A batch whose rows own distinct tail pages; further pages alias, so that small pools serve wide tables."""
    rows = shape.num_contexts + shape.B
    max_ctx = max(1, min(shape.max_blocks * shape.page_size - shape.block_size, 400_000))
    ctx_len = rng.integers(0, max_ctx + 1, shape.max_batch + 1)
    if family == "max_ctx":
        ctx_len = max_ctx - rng.integers(0, 2, shape.max_batch + 1)
    ctx_len[-1] = 0
    slots = rng.permutation(shape.max_batch)[: shape.B]
    if family in ("dummies", "max_ctx"):
        slots[rng.random(shape.B) < 0.5] = shape.max_batch
    num_accepted = rng.integers(1, shape.K + 2, shape.B)

    held = (ctx_len[slots] + shape.K + shape.block_size) // shape.page_size + 1
    counts = np.minimum(np.concatenate([rng.integers(0, shape.max_blocks + 1, shape.num_contexts), held]), shape.max_blocks)
    if family == "outrun":
        counts = rng.choice([0, 1, 2, shape.max_blocks], rows)
        counts = np.minimum(np.where(rng.random(rows) < 0.4, np.append(counts[1:], 1), counts), shape.max_blocks)
    tables = rng.integers(0, shape.num_pages, (rows, shape.max_blocks))
    own = rng.permutation(shape.num_pages)
    for row, count in enumerate(counts):
        tail = np.arange(max(0, count - 2), count)
        tables[row, tail] = own[(2 * row + np.arange(len(tail))) % shape.num_pages]
    encoded = np.where(np.arange(shape.max_blocks) < counts[:, None], tables * shape.divisor, -1)
    encoded = encoded + np.where(encoded >= 0, rng.integers(0, shape.divisor, encoded.shape), 0)
    if family == "holes":
        encoded[rng.random(encoded.shape) < 0.1] = -rng.integers(1, 9)
    counts = (encoded >= 0).sum(axis=1)
    tables = np.maximum(encoded, 0) // shape.divisor
    accepted_tokens = rng.integers(0, shape.vocab, (shape.B, shape.K + 1))
    if family == "hostile":
        edges = [shape.max_batch, shape.max_batch + 1, shape.K + 2, shape.num_pages, shape.max_blocks + 1]
        wild = np.array([-(2**31), -7, -1, 0, 1, *edges, 10**6, 2**31 - 64])
        for array in (slots, num_accepted, counts, tables, accepted_tokens):
            chosen = rng.random(array.shape) < 0.3
            array[chosen] = rng.choice(wild, int(chosen.sum()))
        ctx_len[rng.random(len(ctx_len)) < 0.2] = 10**6

    pools, extra_rows = 2, 1
    encoded_offsets = rng.integers(-5, 999, (pools, rows + extra_rows, 2, shape.max_blocks))
    encoded_offsets[1, :rows, 0] = encoded
    return Batch(
        shape,
        family,
        max_ctx,
        int32(ctx_len),
        int32(slots),
        int32(num_accepted),
        int32(accepted_tokens),
        int32(tables),
        int32(counts),
        int32(encoded_offsets),
    )


def draw_pool(rng: np.random.Generator, shape: BatchShape) -> np.ndarray:
    outer = (shape.L, shape.num_pages) if shape.layout == "layer_major" else (shape.num_pages, shape.L)
    # a long random run over and over: filling a large pool with fresh numbers takes longer than the comparison
    return np.resize(normal(rng, 1 << 18, dtype=shape.dtype), (*outer, shape.page_size, shape.D))


def draw_latents(rng: np.random.Generator, batch: Batch, *outer: int) -> np.ndarray:
    latents = normal(rng, *outer, batch.shape.D, dtype=batch.shape.dtype)
    return specials(rng, latents) if batch.family in ("special", "outrun") else latents


Drawn = tuple[dict[str, Any], dict[str, Any]]


def refresh_block_tables(rng: np.random.Generator, batch: Batch) -> Drawn:
    rows = batch.shape.num_contexts + batch.shape.B
    return {"encoded_offsets": batch.encoded_offsets}, {"pool_idx": 1, "num_seqs": rows, "divisor": batch.shape.divisor}


def gen_prologue(rng: np.random.Generator, batch: Batch) -> Drawn:
    return {
        "accepted_tokens": batch.accepted_tokens,
        "num_accepted": batch.num_accepted,
        "ctx_len": batch.ctx_len,
        "slots": batch.slots,
    }, {"block_size": batch.shape.block_size, "max_ctx": batch.max_ctx, "mask_token_id": 3}


def noise_block(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    vocab = min(shape.vocab, 512)
    embedding = normal(rng, vocab, shape.hidden, dtype=shape.dtype)
    if batch.family == "special":
        specials(rng, embedding)
    operands = {"embedding": embedding, "bonus": np.ascontiguousarray(batch.accepted_tokens[:, 0])}
    if rng.random() < 0.5:
        operands["mask_row"] = normal(rng, *([1] * int(rng.integers(0, 2))), shape.hidden, dtype=shape.dtype)
    return operands, {"block_size": shape.block_size, "mask_token_id": vocab - 1}


def store_gen_context(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    return {
        "pool": draw_pool(rng, shape),
        "latents": draw_latents(rng, batch, shape.B * (shape.K + 1), shape.L),
        "ctx_len": batch.ctx_len,
        "slots": batch.slots,
        "num_accepted": batch.num_accepted,
        "block_tables": batch.block_tables,
        "block_counts": batch.block_counts,
    }, {"layout": shape.layout, "first_row": shape.num_contexts}


def advance_ctx_len(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    return {
        "ctx_len": batch.ctx_len,
        "slots": batch.slots,
        "num_accepted": batch.num_accepted,
        "block_counts": batch.block_counts,
    }, {
        "page_size": shape.page_size,
        "block_size": shape.block_size,
        "max_ctx": batch.max_ctx,
        "first_row": shape.num_contexts,
    }


def scatter_context(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    num_tokens = 19
    rows = rng.integers(0, batch.block_tables.shape[0], num_tokens)
    positions = rng.integers(0, shape.max_blocks * shape.page_size, num_tokens)
    if batch.family == "hostile":
        rows[::3] = rng.choice([-1, len(batch.block_tables), 77, -(2**31)], len(rows[::3]))
        positions[1::3] = rng.choice([-1, 2**31 - 1, shape.max_blocks * shape.page_size], len(positions[1::3]))
    # destinations are distinct by contract: later tokens with a place already taken are padding
    pages = batch.block_tables[np.clip(rows, 0, len(batch.block_tables) - 1)]
    column = np.clip(positions // shape.page_size, 0, shape.max_blocks - 1)
    place = pages[np.arange(num_tokens), column].astype(np.int64) * shape.page_size + positions % shape.page_size
    _, first = np.unique(place, return_index=True)
    rows = np.where(np.isin(np.arange(num_tokens), first), rows, -1)
    return {
        "pool": draw_pool(rng, shape),
        "latents": draw_latents(rng, batch, num_tokens, shape.L),
        "rows": int32(rows),
        "positions": int32(positions),
        "block_tables": batch.block_tables,
    }, {"layout": shape.layout}


def draw_advertised(rng: np.random.Generator, batch: Batch) -> np.ndarray:
    shape = batch.shape
    room = np.clip(batch.block_counts[shape.num_contexts :], 0, shape.max_blocks).astype(np.int64) * shape.page_size
    advertised = np.maximum(room - rng.integers(0, 2 * shape.block_size, shape.B), 0)
    if batch.family == "hostile":
        advertised[rng.random(shape.B) < 0.3] = rng.choice([-5, 2**30, -(2**31)])
    return int32(advertised)


def block_placement(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    operands = {"advertised": draw_advertised(rng, batch), "block_tables": batch.block_tables}
    if rng.random() < 0.7:
        operands["block_counts"] = batch.block_counts
    return operands, {
        "block_size": shape.block_size,
        "page_size": shape.page_size,
        "first_row": shape.num_contexts,
    }


def write_block_latents(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    pages = rng.integers(-1, shape.num_pages, (shape.B, shape.block_size))
    if batch.family == "hostile":
        pages[rng.random(pages.shape) < 0.3] = rng.choice([-9, shape.num_pages, 2**30])
    offsets = rng.integers(0, shape.page_size, pages.shape)
    if batch.family == "hostile":
        offsets[rng.random(pages.shape) < 0.2] = rng.choice([-1, shape.page_size, 2**30])
    block = shape.block_size
    parts: list[Any] = [
        int32(pages),
        int32(offsets),
        np.triu(np.ones((block, block), bool), 1)[None, :, None],
        batch.block_tables[shape.num_contexts :],
        int32(np.full(shape.B, block)),
    ]
    layer = int(rng.integers(0, shape.L)) if rng.random() < 0.3 else None
    outer = (shape.L,) if layer is None else ()
    return {
        "pool": draw_pool(rng, shape),
        "block_latents": draw_latents(rng, batch, *outer, shape.B, block),
        "placement": BlockPlacement(*parts),
    }, {"layout": shape.layout, "layer": layer}


def accept_strict(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    rows = shape.num_contexts + shape.B * (shape.K + 1)
    logits = np.resize(rng.integers(-4, 5, 1_000_003).astype(np.float32), (rows, shape.vocab))
    logits[::3] -= 10  # rows without a positive number
    if batch.family == "special":
        logits[::2, rng.integers(0, shape.vocab, 3)] = np.nan  # the first of several counts
        logits[:, rng.integers(0, shape.vocab)] = np.inf
    gen = np.argmax(logits, axis=1)[shape.num_contexts :].reshape(shape.B, shape.K + 1)
    drafts = gen[:, : shape.K].copy()
    for row, prefix in enumerate(rng.permutation(np.arange(shape.B) % (shape.K + 1))):
        if prefix < shape.K:
            drafts[row, prefix] = (drafts[row, prefix] + 1) % max(shape.vocab, 2)
    if batch.family == "hostile" and drafts.size:
        drafts[rng.random(drafts.shape) < 0.3] = rng.choice([-1, shape.vocab, -(2**31), 2**31 - 1])
    forced = {"force": float(rng.choice([0.0, 1.0, 2.4, 0.7, 99.0])), "force_counter": int(rng.integers(0, 10**6))}
    return {"logits": logits, "draft_tokens": int32(drafts)}, {
        "num_contexts": shape.num_contexts,
        **(forced if batch.family == "dummies" else {}),
    }


def prepare_step(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    drafter, of_noise = noise_block(rng, batch)
    drafter.pop("bonus")
    return {
        "encoded_offsets": batch.encoded_offsets,
        "accepted_tokens": batch.accepted_tokens,
        "num_accepted": batch.num_accepted,
        "ctx_len": batch.ctx_len,
        "slots": batch.slots,
        **(drafter if rng.random() < 0.8 else {}),
    }, {
        "pool_idx": 1,
        "divisor": shape.divisor,
        "page_size": shape.page_size,
        "block_size": shape.block_size,
        "max_ctx": batch.max_ctx,
        "mask_token_id": of_noise["mask_token_id"],
        "num_contexts": shape.num_contexts,
        "advance": bool(rng.random() < 0.7),
    }


def store_prepared(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    pages = rng.integers(-1, shape.num_pages, (shape.B, shape.K + 1))
    if batch.family == "hostile":
        pages[rng.random(pages.shape) < 0.3] = rng.choice([-9, shape.num_pages, 2**30])
    offsets = rng.integers(0, shape.page_size, pages.shape)
    if batch.family == "hostile":
        offsets[rng.random(pages.shape) < 0.2] = rng.choice([-1, shape.page_size, 2**30])
    return {
        "pool": draw_pool(rng, shape),
        "latents": draw_latents(rng, batch, shape.B * (shape.K + 1), shape.L),
        "num_accepted": batch.num_accepted,
        "store_pages": int32(pages),
        "store_offsets": int32(offsets),
    }, {"layout": shape.layout}


def next_tokens(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    rows = shape.num_contexts + shape.B
    n = np.concatenate([np.ones(shape.num_contexts, np.int32), batch.num_accepted])
    return {
        "accepted_tokens": int32(rng.integers(0, shape.vocab, (rows, shape.K + 1))),
        "num_accepted": int32(n),
        "draft_tokens": int32(rng.integers(0, shape.vocab, (shape.B, shape.K))),
    }, {}


def markov_chain(rng: np.random.Generator, batch: Batch, exact: bool) -> Drawn:
    """With `exact` all values are small integers: every product and sum is exact, so the chain must agree in every bit."""
    shape = batch.shape
    draw = integers_or_normal(rng, FLOAT32, exact)
    base = draw(shape.B, max(shape.K, 1), shape.vocab)
    if batch.family == "special":
        base[:, :, rng.integers(0, shape.vocab, 2)] = np.nan
    return {
        "base_logits": base,
        "anchor": np.ascontiguousarray(batch.accepted_tokens[:, 0]),
        "w1": draw(shape.vocab + 5, shape.rank).astype(shape.dtype),
        "w2": draw(shape.vocab, shape.rank).astype(shape.dtype),
    }, {}


def context_latents(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    num_tokens, rope_dim = shape.B * (shape.K + 1), 4 if shape.D < 64 else 64
    angles = np.arange(64)[:, None] / np.power(50.0, np.arange(rope_dim // 2) / rope_dim)
    return {
        "projected": normal(rng, num_tokens, shape.hidden, dtype=shape.dtype),
        "positions": int32(rng.integers(-2, 70, num_tokens)),
        "kv_a_proj": normal(rng, shape.L, shape.D, shape.hidden, dtype=shape.dtype),
        "kv_a_norm": normal(rng, shape.L, shape.D - rope_dim, dtype=shape.dtype),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }, {"eps": 1e-5}


def norm_rope(rng: np.random.Generator, batch: Batch) -> Drawn:
    operands, static = context_latents(rng, batch)
    latents = normal(rng, len(operands["positions"]), batch.shape.L, batch.shape.D, dtype=batch.shape.dtype)
    return {"latents": latents, **{name: operands[name] for name in ("positions", "kv_a_norm", "cos", "sin")}}, static


def norm_rope_store(rng: np.random.Generator, batch: Batch) -> Drawn:
    """Latents without the special values that `norm_rope` and `store_prepared` get by themselves."""
    floats, of_floats = norm_rope(rng, batch)
    stored, of_store = store_prepared(rng, batch)
    operands = {"pool": stored.pop("pool"), "latents": floats.pop("latents")}
    stored.pop("latents")
    return operands | floats | stored, of_floats | of_store | {"return_latents": bool(rng.random() < 0.5)}


def integers_or_normal(rng: np.random.Generator, dtype: Any, exact: bool) -> Callable[..., np.ndarray]:
    """Small integers, whose products and sums are exact, or standard normal values. No zeros: -1 * 0 is -0.0 until it is added
    to something."""
    if exact:
        return lambda *dims: rng.choice(np.array([-3, -2, -1, 1, 2, 3], np.float32), dims).astype(dtype)
    return lambda *dims: normal(rng, *dims, dtype=dtype)


def linear(rng: np.random.Generator, batch: Batch, exact: bool) -> Drawn:
    """Also a K and an N that no tile divides, a K that is split, another dtype of x, a residual."""
    shape = batch.shape
    draw = integers_or_normal(rng, shape.dtype, exact)
    outer = (shape.B, shape.block_size) if rng.random() < 0.5 else (shape.B * (shape.K + 1),)
    N, K = [(shape.D, shape.hidden), (shape.hidden, 8 * shape.D - 1), (shape.vocab, shape.rank)][int(rng.integers(0, 3))]
    operands = {"x": draw(*outer, K), "weight": draw(N, K)}
    if rng.random() < 0.3:
        operands["x"] = operands["x"].astype(np.float32)
    if rng.random() < 0.5:
        operands["residual"] = draw(*outer, N)
    return operands, {}


def head_product(rng: np.random.Generator, batch: Batch, exact: bool) -> Drawn:
    shape = batch.shape
    draw = integers_or_normal(rng, shape.dtype, exact)
    heads, rank, head_dim = 3, shape.D - 4, 16 if shape.D < 64 else 128
    transposed = bool(rng.random() < 0.5)
    x = draw(shape.B, shape.block_size, heads, rank if transposed else head_dim)
    if exact:
        x = np.sign(x).astype(shape.dtype)  # sums that bf16 holds, too: XLA on a CPU sums this product in bf16
    return {"x": x, "weight": draw(heads, head_dim, rank)}, {"transposed": transposed}


def rms_norm(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    rows = (shape.B, shape.block_size, shape.L)[: int(rng.integers(1, 4))]
    weight = (shape.L, shape.hidden) if len(rows) == 3 and rng.random() < 0.5 else (shape.hidden,)
    operands = {"x": normal(rng, *rows, shape.hidden, dtype=shape.dtype), "weight": normal(rng, *weight, dtype=shape.dtype)}
    return operands, {"eps": 1e-5}


def rope(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    pairs = int(rng.choice([1, 4, 32]))
    angles = rng.uniform(-4, 4, (shape.B, shape.block_size, 1, pairs))
    return {
        "x": normal(rng, shape.B, shape.block_size, 3, 2 * pairs, dtype=shape.dtype),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }, {}


def swiglu(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = batch.shape
    size = (shape.B, shape.block_size, shape.hidden)
    gate = 4 * normal(rng, *size)
    gate.reshape(-1)[:4] = [0.0, -0.0, 200.0, -200.0]
    return {"gate": gate.astype(shape.dtype), "up": normal(rng, *size, dtype=shape.dtype)}, {}


def block_attention(rng: np.random.Generator, batch: Batch) -> Drawn:
    shape = dataclasses.replace(batch.shape, max_blocks=min(batch.shape.max_blocks, 40))
    tables = np.clip(batch.block_tables[shape.num_contexts :, : shape.max_blocks], 0, shape.num_pages - 1)
    room = shape.max_blocks * shape.page_size
    advertised = rng.choice([0, 1, room // 2, room], shape.B)
    if batch.family == "hostile":
        tables[rng.random(tables.shape) < 0.1] = rng.choice([-1, shape.num_pages, 2**30])
    pool = draw_pool(rng, shape)
    seen = np.zeros((shape.num_pages, shape.page_size), bool)
    for row, length in zip(tables, advertised):
        position = np.arange(length)
        page, offset = row[position // shape.page_size], position % shape.page_size
        exists = (page >= 0) & (page < shape.num_pages)
        seen[page[exists], offset[exists]] = True
    by_layer = pool if shape.layout == "layer_major" else pool.swapaxes(0, 1)
    by_layer[:, ~seen] = np.nan  # what no row may see may not matter
    heads, block = 8 if shape.hidden == K3["hidden"] else 2, shape.block_size
    return {
        "query": normal(rng, shape.B, block, heads, shape.D, dtype=shape.dtype),
        "block_latents": normal(rng, shape.B, block, shape.D, dtype=shape.dtype),
        "pool": pool,
        "page_tables": int32(tables),
        "advertised": int32(advertised),
    }, {
        "layer": int(rng.integers(0, shape.L)),
        "scale": shape.D**-0.5,
        "kv_lora_rank": shape.D - (4 if shape.D < 64 else 64),
        "layout": shape.layout,
    }


EXACT_OPS: dict[str, Callable[[np.random.Generator, Batch], Drawn]] = {
    "refresh_block_tables": refresh_block_tables,
    "gen_prologue": gen_prologue,
    "noise_block": noise_block,
    "store_gen_context": store_gen_context,
    "advance_ctx_len": advance_ctx_len,
    "scatter_context": scatter_context,
    "block_placement": block_placement,
    "write_block_latents": write_block_latents,
    "prepare_step": prepare_step,
    "store_prepared": store_prepared,
    "accept_strict": accept_strict,
    "next_tokens": next_tokens,
    "markov_chain": lambda rng, batch: markov_chain(rng, batch, exact=True),
    "linear": lambda rng, batch: linear(rng, batch, exact=True),
    "head_product": lambda rng, batch: head_product(rng, batch, exact=True),
}
"""Ops whose backends must agree in every bit; products on integers, whose sums are exact."""

PRODUCT_OPS = ("markov_chain", "linear", "head_product")
"""Exact ops that compute: Triton's interpreter is not to be trusted with their bf16 cases."""

BOUNDED_OPS: dict[str, Callable[[np.random.Generator, Batch], Drawn]] = {
    "norm_rope": norm_rope,
    "norm_rope_store": norm_rope_store,
    "context_latents": context_latents,
    "markov_chain": lambda rng, batch: markov_chain(rng, batch, exact=False),
    "linear": lambda rng, batch: linear(rng, batch, exact=False),
    "head_product": lambda rng, batch: head_product(rng, batch, exact=False),
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "block_attention": block_attention,
}
"""Ops whose backends may round differently, within `BOUNDS`."""

BOUNDS = {"float32": 2e-5, "bfloat16": 2**-7}
"""Largest allowed `max|a - b| / max|b|` of a bounded op, by the weights' dtype: about 2^9 fp32 roundings, 1 to 2 bf16 ulps."""

WIDER_BOUNDS = {("head_product", "bfloat16"): 2**-4, ("linear", "bfloat16"): 2**-6}
"""Batched bf16 products: XLA on a CPU sums them in bf16, and is itself 0.025 away from float64 at K = 128. With a residual a
product is rounded twice."""


def bound_of(op: str, dtype: str) -> float:
    """The bound of one bounded op."""
    return WIDER_BOUNDS.get((op, dtype), BOUNDS[dtype])


def many_tokens(op: str, seed: int) -> Case:
    """A case of a pool writer with more entries than a kernel compares at once, many of them onto places taken later."""
    rng = np.random.default_rng([seed, zlib.crc32(op.encode())])
    shape = BatchShape(150, 7, 8, 4, 6, 1, "page_major", FLOAT32, L=1, D=2, max_batch=200, num_pages=40)
    if op == "store_gen_context":
        shape = dataclasses.replace(shape, B=40)
    batch = draw_batch(rng, shape, "plain")
    batch.block_tables[:] = batch.block_tables % 3
    operands, static = EXACT_OPS[op](rng, batch)
    while static.get("layer") is not None:
        operands, static = EXACT_OPS[op](rng, batch)
    if op == "scatter_context":  # its usual cases keep destinations apart, as the contract has them
        num_tokens = 1100
        operands |= {
            "latents": normal(rng, num_tokens, 1, 2),
            "rows": int32(rng.integers(0, 151, num_tokens)),
            "positions": int32(rng.integers(0, 24, num_tokens)),
        }
    return Case(op, "many tokens", operands, static, "float32")


def draw_case(op: str, index: int, seed: int, *, bounded: bool = False, shapes: tuple[BatchShape, ...] = SHAPES) -> Case:
    """Case number `index` of an op. Shapes and families are walked through in turn, so that every pair occurs."""
    rng = np.random.default_rng([seed, index, zlib.crc32(op.encode()), int(bounded)])
    shape = shapes[index % len(shapes)]
    family = FAMILIES[(index + index // len(shapes)) % len(FAMILIES)]
    batch = draw_batch(rng, shape, family)
    operands, static = (BOUNDED_OPS if bounded else EXACT_OPS)[op](rng, batch)
    label = f"{family}, B={shape.B} K={shape.K} P={shape.page_size} columns={shape.max_blocks} {shape.layout} {shape.dtype}"
    bound = bound_of(op, shape.dtype.name) if bounded else None
    return Case(op, label, operands, static, shape.dtype.name, family == "strided", bound)
