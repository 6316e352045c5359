from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.accept_strict import FORCE_POOL_SIZE, advances_force_counter, force_pool, split_force

from .argmax import as_key, index_of_key, keep_better, order_of_key, value_order
from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides

if TYPE_CHECKING:
    import torch


@triton.jit
def partial_argmax_kernel(  # type: ignore[no-untyped-def]
    logits,  # [rows, V]
    partial,  # [rows, parts, 2] out: the order of the part's best value, and its index
    ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the best of TILES * LANES logits of one row."""
    row, part = tl.program_id(0), tl.program_id(1)
    row_logits = logits + row.to(tl.int64) * ROW_STRIDE
    index = part * TILES * LANES + tl.arange(0, LANES)
    best = tl.load(row_logits + index * COLUMN_STRIDE, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    best_index = index
    for _ in tl.static_range(1, TILES):
        index += LANES
        values = tl.load(row_logits + index * COLUMN_STRIDE, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
        best, best_index = keep_better(best, best_index, values, index)
    key = tl.max(as_key(value_order(best), best_index))
    found = partial + (row * PARTS + part) * 2
    tl.store(found, order_of_key(key))
    tl.store(found + 1, index_of_key(key))


@triton.jit
def match_drafts_kernel(  # type: ignore[no-untyped-def]
    partial,  # [num_contexts + B*(K+1), parts, 2]
    draft_tokens,  # [B, K]
    uniforms,  # [4096] if DRAWS, else anything
    force_counter,  # [1] if DRAWS, else anything
    accepted_tokens,  # [num_contexts + B, K+1] out
    num_accepted,  # [num_contexts + B] out
    NUM_CONTEXTS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, DRAFT_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    FORCED: tl.constexpr, TOTAL: tl.constexpr, DRAWS: tl.constexpr, FRACTION: tl.constexpr, FORCE_POOL: tl.constexpr,
    WIDTH_LANES: tl.constexpr, PART_LANES: tl.constexpr,
):  # fmt: skip
    """Program (row): merge the parts of one request's positions, and count the drafts that agree."""
    row = tl.program_id(0)
    b = row - NUM_CONTEXTS
    is_gen = b >= 0
    first = tl.where(is_gen, NUM_CONTEXTS + b * (K + 1), row)
    width = tl.where(is_gen, K + 1, 1)

    j = tl.arange(0, WIDTH_LANES)
    part = tl.arange(0, PART_LANES)
    found = partial + ((first + j)[:, None] * PARTS + part[None, :]) * 2
    inside = (j < width)[:, None] & (part < PARTS)[None, :]
    order = tl.load(found, mask=inside, other=-0x80000000)
    index = tl.load(found + 1, mask=inside, other=0x7FFFFFFF)
    token = tl.where(j < width, index_of_key(tl.max(as_key(order, index), axis=1)), 0)
    tl.store(accepted_tokens + row * (K + 1) + j, token, mask=j < K + 1)

    drafted = is_gen & (j < K)
    draft = tl.load(draft_tokens + b * DRAFT_STRIDE + j * TOKEN_STRIDE, mask=drafted, other=-1)
    matching = tl.min(tl.where(drafted & (draft == token), K, tl.minimum(j, K)))
    n = 1 + matching
    if FORCED:
        n = tl.zeros([], tl.int32) + TOTAL
        if DRAWS:
            # FORCE_POOL is a power of two, so that neither wrap-around nor the sign changes the index
            draw = ((tl.load(force_counter).to(tl.int32) + 1) * 1000003 + b * 7919) & (FORCE_POOL - 1)
            n += (tl.load(uniforms + draw) < FRACTION).to(tl.int32)
    tl.store(num_accepted + row, tl.where(is_gen, n, 1))


def _partial_launch(logits: Any) -> Launch:
    rows, vocab_size = logits.shape
    row_stride, column_stride = strides(logits)
    lanes = power_of_2(vocab_size, at_most=2048)
    tiles = 4 if vocab_size > 4 * lanes else 1
    constexprs = {
        "ROW_STRIDE": row_stride,
        "COLUMN_STRIDE": column_stride,
        "VOCAB": vocab_size,
        "PARTS": triton.cdiv(vocab_size, tiles * lanes),
        "TILES": tiles,
        "LANES": lanes,
    }
    return Launch((rows, constexprs["PARTS"]), constexprs)


def _match_launch(draft_tokens: Any, num_contexts: int, force: float, parts: int) -> Launch:
    num_gen, K = draft_tokens.shape
    draft_stride, token_stride = strides(draft_tokens)
    whole, fraction = split_force(force)
    constexprs = {
        "NUM_CONTEXTS": num_contexts,
        "K": K,
        "PARTS": parts,
        "DRAFT_STRIDE": draft_stride,
        "TOKEN_STRIDE": token_stride,
        "FORCED": force > 0,
        "TOTAL": min(whole + 1, K + 1),
        "DRAWS": advances_force_counter(force, K),
        "FRACTION": float(np.float32(fraction)),
        "FORCE_POOL": FORCE_POOL_SIZE,
        "WIDTH_LANES": power_of_2(K + 1),
        "PART_LANES": power_of_2(parts),
    }
    return Launch((num_contexts + num_gen,), constexprs)


@functools.cache
def _uniforms_on(device: torch.device) -> torch.Tensor:
    import torch

    return torch.from_numpy(force_pool().copy()).to(device)


def accept_strict(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    num_contexts: int = 0,
    force: float = 0.0,
    force_counter: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's argmax at every position and how many drafts agree, two launches; see `jdspark.ops.accept_strict`."""
    import torch

    contracts.accept_strict(logits, draft_tokens, num_contexts, force)

    num_gen, K = draft_tokens.shape
    search = _partial_launch(logits)
    match = _match_launch(draft_tokens, num_contexts, force, search.constexprs["PARTS"])
    partial = logits.new_empty((*search.grid, 2), dtype=torch.int32)
    accepted_tokens = logits.new_empty((num_contexts + num_gen, K + 1), dtype=torch.int32)
    num_accepted = logits.new_empty(num_contexts + num_gen, dtype=torch.int32)
    uniforms = counter = partial
    if match.constexprs["DRAWS"]:
        uniforms = _uniforms_on(logits.device)
        counter = torch.as_tensor(force_counter, dtype=torch.int32, device=logits.device).reshape(1)
    launch_in_torch(partial_argmax_kernel, [logits, partial], search)
    launch_in_torch(match_drafts_kernel, [partial, draft_tokens, uniforms, counter, accepted_tokens, num_accepted], match)
    return accepted_tokens, num_accepted


def accept_strict_in_jax(
    logits: jax.Array,
    draft_tokens: jax.Array,
    *,
    num_contexts: int = 0,
    force: float = 0.0,
    force_counter: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """See `jdspark.ops.accept_strict`."""
    num_gen, K = draft_tokens.shape
    outputs = [
        jax.ShapeDtypeStruct((num_contexts + num_gen, K + 1), jnp.int32),
        jax.ShapeDtypeStruct((num_contexts + num_gen,), jnp.int32),
    ]
    if num_contexts + num_gen == 0:
        return jnp.zeros(outputs[0].shape, jnp.int32), jnp.zeros(outputs[1].shape, jnp.int32)
    search = _partial_launch(logits)
    match = _match_launch(draft_tokens, num_contexts, force, search.constexprs["PARTS"])
    partial_shape = jax.ShapeDtypeStruct((*search.grid, 2), jnp.int32)
    (partial,) = launch_in_jax(partial_argmax_kernel, [jnp.asarray(logits)], [partial_shape], search)
    uniforms = counter = partial
    if match.constexprs["DRAWS"]:
        uniforms = jnp.asarray(force_pool())
        counter = jnp.reshape(jnp.asarray(force_counter, jnp.int32), 1)
    inputs = [partial, jnp.asarray(draft_tokens), uniforms, counter]
    accepted_tokens, num_accepted = launch_in_jax(match_drafts_kernel, inputs, outputs, match)
    return accepted_tokens, num_accepted
