"""What each op accepts, checked before anything runs: one function per op, shared by its JAX, torch and kernel forms.

Each raises TypeError for a wrong dtype and ValueError for a wrong shape or static number, naming the operand.
"""

from __future__ import annotations

import math
from typing import Any

from .checks import (
    FLOATS,
    INTEGERS,
    Layout,
    expect,
    expect_gen_rows,
    expect_number,
    expect_same_dtype,
    pool_dims,
)

MAX_CTX = 1 << 24
"""The longest context: 16M tokens, so that sums over a batch stay inside int32."""


def refresh_block_tables(encoded_offsets: Any, pool_idx: int, num_seqs: int, divisor: int) -> None:
    op = "refresh_block_tables"
    expect(op, "encoded_offsets", encoded_offsets, {"pools": None, "seqs": None, "2": 2, "max_blocks": None}, ("int32",))
    expect_number(op, "pool_idx", pool_idx, 0, encoded_offsets.shape[0] - 1)
    expect_number(op, "num_seqs", num_seqs, 0, encoded_offsets.shape[1])
    expect_number(op, "divisor", divisor, 1)


def gen_prologue(
    accepted_tokens: Any, num_accepted: Any, ctx_len: Any, slots: Any, block_size: int, max_ctx: int, mask_token_id: int
) -> None:
    op = "gen_prologue"
    expect(op, "accepted_tokens", accepted_tokens, {"B": None, "K+1": None}, INTEGERS)
    num_gen, width = accepted_tokens.shape
    expect_number(op, "the width K+1 of accepted_tokens", width, 1)
    expect(op, "num_accepted", num_accepted, {"B": num_gen}, INTEGERS)
    expect(op, "ctx_len", ctx_len, {"max_batch+1": None}, INTEGERS)
    expect(op, "slots", slots, {"B": num_gen}, INTEGERS)
    expect_number(op, "block_size", block_size, 1)
    expect_number(op, "max_ctx", max_ctx, 0, MAX_CTX)
    expect_number(op, "mask_token_id", mask_token_id, 0)


def noise_block(embedding: Any, bonus: Any, block_size: int, mask_token_id: int, mask_row: Any) -> None:
    op = "noise_block"
    expect(op, "embedding", embedding, {"V": None, "H": None}, FLOATS)
    vocab_size, hidden = embedding.shape
    expect(op, "bonus", bonus, {"B": None}, INTEGERS)
    expect_number(op, "block_size", block_size, 1)
    if mask_row is None:
        expect_number(op, "mask_token_id", mask_token_id, 0, vocab_size - 1)
    else:
        dims: dict[str, int | None] = {"H": hidden} if len(mask_row.shape) == 1 else {"1": 1, "H": hidden}
        expect(op, "mask_row", mask_row, dims, FLOATS)


def store_gen_context(
    pool: Any,
    latents: Any,
    ctx_len: Any,
    slots: Any,
    num_accepted: Any,
    block_tables: Any,
    block_counts: Any,
    layout: Layout,
    first_row: int,
) -> int:
    """Returns K."""
    op = "store_gen_context"
    num_layers, _, _, width = pool_dims(op, pool, layout)
    expect(op, "slots", slots, {"B": None}, INTEGERS)
    num_gen = slots.shape[0]
    expect(op, "latents", latents, {"B*(K+1)": None, "L": num_layers, "D": width})
    expect_same_dtype(op, "latents", latents, pool)
    expect(op, "ctx_len", ctx_len, {"max_batch+1": None}, INTEGERS)
    expect(op, "num_accepted", num_accepted, {"B": num_gen}, INTEGERS)
    _block_tables(op, block_tables)
    expect(op, "block_counts", block_counts, {"rows": block_tables.shape[0]}, INTEGERS)
    expect_gen_rows(op, first_row, num_gen, block_tables, "block_tables")
    tokens_per_request = latents.shape[0] // max(num_gen, 1)
    if tokens_per_request * num_gen != latents.shape[0] or (num_gen and not tokens_per_request):
        raise ValueError(f"{op}: latents has {latents.shape[0]} rows, expected B*(K+1) with B={num_gen} from slots")
    return tokens_per_request - 1


def advance_ctx_len(
    ctx_len: Any,
    slots: Any,
    num_accepted: Any,
    block_counts: Any,
    page_size: int,
    block_size: int,
    max_ctx: int,
    first_row: int,
) -> None:
    op = "advance_ctx_len"
    expect(op, "ctx_len", ctx_len, {"max_batch+1": None}, INTEGERS)
    expect(op, "slots", slots, {"B": None}, INTEGERS)
    num_gen = slots.shape[0]
    expect(op, "num_accepted", num_accepted, {"B": num_gen}, INTEGERS)
    expect(op, "block_counts", block_counts, {"rows": None}, INTEGERS)
    expect_gen_rows(op, first_row, num_gen, block_counts, "block_counts")
    expect_number(op, "page_size", page_size, 1)
    expect_number(op, "block_size", block_size, 1)
    expect_number(op, "max_ctx", max_ctx, 0, MAX_CTX)


def scatter_context(pool: Any, latents: Any, rows: Any, positions: Any, block_tables: Any, layout: Layout) -> None:
    op = "scatter_context"
    num_layers, _, _, width = pool_dims(op, pool, layout)
    expect(op, "latents", latents, {"N": None, "L": num_layers, "D": width})
    expect_same_dtype(op, "latents", latents, pool)
    num_tokens = latents.shape[0]
    expect(op, "rows", rows, {"N": num_tokens}, INTEGERS)
    expect(op, "positions", positions, {"N": num_tokens}, INTEGERS)
    _block_tables(op, block_tables)
    expect_number(op, "the row count of block_tables", block_tables.shape[0], 1)


def block_placement(
    advertised: Any, block_tables: Any, block_size: int, page_size: int, first_row: int, block_counts: Any
) -> None:
    op = "block_placement"
    expect(op, "advertised", advertised, {"B": None}, INTEGERS)
    _block_tables(op, block_tables)
    expect_number(op, "block_size", block_size, 1)
    expect_number(op, "page_size", page_size, 1)
    expect_gen_rows(op, first_row, advertised.shape[0], block_tables, "block_tables")
    if block_counts is not None:
        expect(op, "block_counts", block_counts, {"rows": block_tables.shape[0]}, INTEGERS)


def write_block_latents(pool: Any, block_latents: Any, placement: Any, layout: Layout, layer: int | None) -> None:
    op = "write_block_latents"
    num_layers, _, _, width = pool_dims(op, pool, layout)
    expect(op, "placement.pages", placement.pages, {"B": None, "block_size": None}, INTEGERS)
    num_gen, block_size = placement.pages.shape
    expect(op, "placement.offsets", placement.offsets, {"B": num_gen, "block_size": block_size}, INTEGERS)
    dims: dict[str, int | None] = {"B": num_gen, "block_size": block_size, "D": width}
    if layer is None:
        dims = {"L": num_layers, **dims}
    else:
        expect_number(op, "layer", layer, 0, num_layers - 1)
    expect(op, "block_latents", block_latents, dims)
    expect_same_dtype(op, "block_latents", block_latents, pool)


def accept_strict(logits: Any, draft_tokens: Any, num_contexts: int, force: float) -> None:
    op = "accept_strict"
    expect(op, "draft_tokens", draft_tokens, {"B": None, "K": None}, INTEGERS)
    num_gen, K = draft_tokens.shape
    expect_number(op, "num_contexts", num_contexts, 0)
    expect(op, "logits", logits, {"num_contexts + B*(K+1)": num_contexts + num_gen * (K + 1), "V": None}, FLOATS)
    expect_number(op, "the vocabulary V of logits", logits.shape[1], 1)
    if not math.isfinite(force) or force < 0:
        raise ValueError(f"{op}: force is {force}, expected a finite number >= 0 (0 = off)")


def markov_chain(base_logits: Any, anchor: Any, w1: Any, w2: Any) -> None:
    op = "markov_chain"
    expect(op, "base_logits", base_logits, {"B": None, "K": None, "V": None}, FLOATS)
    num_gen, _, vocab_size = base_logits.shape
    expect_number(op, "the vocabulary V of base_logits", vocab_size, 1)
    expect(op, "anchor", anchor, {"B": num_gen}, INTEGERS)
    _markov_weights(op, w1, w2, vocab_size)


def _markov_weights(op: str, w1: Any, w2: Any, vocab_size: int) -> None:
    expect(op, "w1", w1, {"V1": None, "r": None}, FLOATS)
    expect_number(op, "the rank r of w1", w1.shape[1], 1)
    expect_number(op, "the rows V1 of w1", w1.shape[0], vocab_size)
    expect(op, "w2", w2, {"V": vocab_size, "r": w1.shape[1]}, FLOATS)
    expect_same_dtype(op, "w2", w2, w1)


def filtered_probabilities(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> None:
    op = "filtered_probabilities"
    expect(op, "logits", logits, {"rows": None, "V": None}, FLOATS)
    rows, vocab_size = logits.shape
    expect_number(op, "the vocabulary V of logits", vocab_size, 1)
    expect(op, "temperature", temperature, {"rows": rows}, ("float32",))
    expect(op, "top_k", top_k, {"rows": rows}, INTEGERS)
    expect(op, "top_p", top_p, {"rows": rows}, ("float32",))


def row_sampling(op: str, sampling: Any, rows: int) -> None:
    dtypes = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "seeds": "uint32", "positions": "int32"}
    if not all(hasattr(sampling, name) for name in dtypes):
        raise TypeError(
            f"{op}: sampling is a {type(sampling).__name__}, expected a RowSampling, one entry per row:"
            " jdspark.row_sampling(requests, positions) makes one of SamplingParams"
        )
    for name, dtype in dtypes.items():
        expect(op, f"sampling.{name}", getattr(sampling, name), {"rows": rows}, (dtype,))


def sampled_chain(base_logits: Any, anchor: Any, w1: Any, w2: Any, sampling: Any) -> None:
    op = "sampled_chain"
    expect(op, "base_logits", base_logits, {"B": None, "K": None, "V": None}, ("float32",))
    num_gen, _, vocab_size = base_logits.shape
    expect_number(op, "the vocabulary V of base_logits", vocab_size, 1)
    expect(op, "anchor", anchor, {"B": num_gen}, INTEGERS)
    row_sampling(op, sampling, num_gen)
    if (w1 is None) != (w2 is None):
        raise ValueError(f"{op}: w1 and w2 come together, one of them is None")
    if w1 is not None:
        _markov_weights(op, w1, w2, vocab_size)


def accept_sampled(logits: Any, draft_tokens: Any, draft_probabilities: Any, sampling: Any, num_contexts: int) -> None:
    op = "accept_sampled"
    expect(op, "draft_tokens", draft_tokens, {"B": None, "K": None}, INTEGERS)
    num_gen, K = draft_tokens.shape
    expect_number(op, "num_contexts", num_contexts, 0)
    expect(op, "logits", logits, {"num_contexts + B*(K+1)": num_contexts + num_gen * (K + 1), "V": None}, FLOATS)
    expect_number(op, "the vocabulary V of logits", logits.shape[1], 1)
    expect(op, "draft_probabilities", draft_probabilities, {"B": num_gen, "K": K, "V'": None}, ("float32",))
    expect_number(op, "the width V' of draft_probabilities", draft_probabilities.shape[2], 1, logits.shape[1])
    row_sampling(op, sampling, num_contexts + num_gen)


def next_tokens(accepted_tokens: Any, num_accepted: Any, draft_tokens: Any) -> int:
    """Returns num_contexts."""
    op = "next_tokens"
    expect(op, "accepted_tokens", accepted_tokens, {"rows": None, "K+1": None}, INTEGERS)
    rows, width = accepted_tokens.shape
    expect_number(op, "the width K+1 of accepted_tokens", width, 1)
    expect(op, "num_accepted", num_accepted, {"rows": rows}, INTEGERS)
    expect(op, "draft_tokens", draft_tokens, {"B": None, "K": width - 1}, INTEGERS)
    num_contexts = rows - draft_tokens.shape[0]
    expect_number(op, "rows - B", num_contexts, 0)
    return num_contexts


def context_latents(projected: Any, positions: Any, kv_a_proj: Any, kv_a_norm: Any, cos: Any, sin: Any) -> None:
    op = "context_latents"
    expect(op, "kv_a_proj", kv_a_proj, {"L": None, "D": None, "H": None}, FLOATS)
    num_layers, width, hidden = kv_a_proj.shape
    expect(op, "projected", projected, {"N": None, "H": hidden}, FLOATS)
    expect(op, "positions", positions, {"N": projected.shape[0]}, INTEGERS)
    _norm_rope_weights(op, num_layers, width, kv_a_norm, cos, sin)


def norm_rope(latents: Any, positions: Any, kv_a_norm: Any, cos: Any, sin: Any) -> None:
    op = "norm_rope"
    expect(op, "latents", latents, {"N": None, "L": None, "D": None}, FLOATS)
    num_tokens, num_layers, width = latents.shape
    expect(op, "positions", positions, {"N": num_tokens}, INTEGERS)
    _norm_rope_weights(op, num_layers, width, kv_a_norm, cos, sin)


def _norm_rope_weights(op: str, num_layers: int, width: int, kv_a_norm: Any, cos: Any, sin: Any) -> None:
    expect(op, "kv_a_norm", kv_a_norm, {"L": num_layers, "kv_lora_rank": None}, FLOATS)
    rope_dim = width - kv_a_norm.shape[1]
    expect_number(op, "kv_lora_rank", kv_a_norm.shape[1], 1)
    expect_number(op, "the rope width D - kv_lora_rank", rope_dim, 0)
    if rope_dim % 2:
        raise ValueError(f"{op}: the rope width D - kv_lora_rank is {rope_dim}, expected an even number (rope rotates pairs)")
    expect(op, "cos", cos, {"length": None, "rope/2": rope_dim // 2}, ("float32",))
    expect(op, "sin", sin, {"length": cos.shape[0], "rope/2": rope_dim // 2}, ("float32",))


def prepare_step(
    encoded_offsets: Any,
    accepted_tokens: Any,
    num_accepted: Any,
    ctx_len: Any,
    slots: Any,
    pool_idx: int,
    divisor: int,
    page_size: int,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
    num_contexts: int,
    embedding: Any,
    mask_row: Any,
) -> None:
    gen_prologue(accepted_tokens, num_accepted, ctx_len, slots, block_size, max_ctx, mask_token_id)
    expect_number("prepare_step", "num_contexts", num_contexts, 0)
    refresh_block_tables(encoded_offsets, pool_idx, num_contexts + slots.shape[0], divisor)
    expect_number("prepare_step", "the width max_blocks of encoded_offsets", encoded_offsets.shape[3], 1)
    expect_number("prepare_step", "page_size", page_size, 1)
    if embedding is not None:
        noise_block(embedding, num_accepted, block_size, mask_token_id, mask_row)  # one bonus token each, an integer like these
    elif mask_row is not None:
        raise ValueError("prepare_step: mask_row is there and embedding is None; the noise block needs both, or neither")


def store_prepared(pool: Any, latents: Any, num_accepted: Any, store_pages: Any, store_offsets: Any, layout: Layout) -> None:
    op = "store_prepared"
    num_layers, _, _, width = pool_dims(op, pool, layout)
    expect(op, "store_pages", store_pages, {"B": None, "K+1": None}, INTEGERS)
    num_gen, tokens = store_pages.shape
    expect(op, "store_offsets", store_offsets, {"B": num_gen, "K+1": tokens}, INTEGERS)
    expect(op, "num_accepted", num_accepted, {"B": num_gen}, INTEGERS)
    expect(op, "latents", latents, {"B*(K+1)": num_gen * tokens, "L": num_layers, "D": width})
    expect_same_dtype(op, "latents", latents, pool)


def block_attention(
    query: Any,
    block_latents: Any,
    pool: Any,
    page_tables: Any,
    advertised: Any,
    layer: int,
    kv_lora_rank: int,
    layout: Layout,
) -> None:
    op = "block_attention"
    num_layers, _, _, width = pool_dims(op, pool, layout)
    expect(op, "query", query, {"B": None, "block_size": None, "heads": None, "D": width}, FLOATS)
    num_gen, block_size = query.shape[:2]
    expect(op, "block_latents", block_latents, {"B": num_gen, "block_size": block_size, "D": width}, FLOATS)
    expect(op, "page_tables", page_tables, {"B": num_gen, "max_blocks": None}, INTEGERS)
    expect(op, "advertised", advertised, {"B": num_gen}, INTEGERS)
    expect_number(op, "layer", layer, 0, num_layers - 1)
    expect_number(op, "kv_lora_rank", kv_lora_rank, 1, width)


def linear(x: Any, weight: Any, residual: Any) -> None:
    op = "linear"
    expect(op, "weight", weight, {"N": None, "K": None}, FLOATS)
    expect(op, "x", x, {**_leading(x), "K": weight.shape[1]}, FLOATS)
    if residual is not None:
        outer = dict(zip(_leading(x), x.shape, strict=False))
        expect(op, "residual", residual, {**outer, "N": weight.shape[0]}, FLOATS)


def head_product(x: Any, weight: Any, transposed: bool) -> None:
    op = "head_product"
    expect(op, "x", x, {"B": None, "T": None, "heads": None, "K": None}, FLOATS)
    heads, size = x.shape[2:]
    dims: dict[str, int | None] = {"heads": heads, "K": size, "N": None}
    expect(op, "weight", weight, {"heads": heads, "N": None, "K": size} if transposed else dims, FLOATS)
    expect_same_dtype(op, "weight", weight, x, "x")


def rms_norm(x: Any, weight: Any) -> None:
    op = "rms_norm"
    expect(op, "x", x, {**_leading(x), "H": None}, FLOATS)
    names = ("L", "H") if len(getattr(weight, "shape", ())) > 1 else ("H",)
    expect(op, "weight", weight, dict(zip(names, x.shape[-len(names) :], strict=False)), FLOATS)


def rope(x: Any, cos: Any, sin: Any) -> None:
    op = "rope"
    expect(op, "x", x, {**_leading(x), "rope": None}, FLOATS)
    expect_number(op, "the rank of x", len(x.shape), 2)
    if x.shape[-1] % 2:
        raise ValueError(f"{op}: x has an odd last axis, {x.shape[-1]}; rope rotates pairs")
    outer = dict(zip(list(_leading(x))[:-1], x.shape, strict=False))
    for name, table in (("cos", cos), ("sin", sin)):
        expect(op, name, table, {**outer, "1": 1, "rope/2": x.shape[-1] // 2}, ("float32",))


def swiglu(gate: Any, up: Any) -> None:
    op = "swiglu"
    expect(op, "gate", gate, {**_leading(gate), "I": None}, FLOATS)
    expect(op, "up", up, dict(zip([*_leading(gate), "I"], gate.shape, strict=True)), FLOATS)
    expect_same_dtype(op, "up", up, gate, "gate")


def _leading(array: Any) -> dict[str, int | None]:
    """Names for every axis but the last, of any size."""
    return {f"axis {axis}": None for axis in range(len(getattr(array, "shape", (0,))) - 1)}


def _block_tables(op: str, block_tables: Any) -> None:
    expect(op, "block_tables", block_tables, {"rows": None, "max_blocks": None}, INTEGERS)
    expect_number(op, "the width max_blocks of block_tables", block_tables.shape[1], 1)
