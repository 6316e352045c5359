from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.safety import safe_tokens

from .argmax import as_key, index_of_key, keep_better, order_of_key, value_order
from .latent_pool import as_bits
from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2, strides
from .linear import linear, linear_in_jax

if TYPE_CHECKING:
    import torch


@triton.jit
def markov_slot_kernel(  # type: ignore[no-untyped-def]
    base_logits,  # [B, K, V]; in JAX the same buffer as corrected
    bias,  # [B, V], the product for this slot in the weights' dtype
    w1,  # [V1, r]
    tokens_before,  # [B, K], not read: its buffer is the output's
    arrivals_before,  # [B], not read: its buffer is the output's
    corrected,  # [B, K, V] fp32 out
    tokens,  # [B, K] out
    arrivals,  # [B] int32, zeros before and after: programs of a row that are done
    previous_rows,  # [B, r] out: w1 of the token just picked
    partial,  # [B, parts, 2] out: the order of each part's best value, and its index
    SLOT: tl.constexpr, K: tl.constexpr, VOCAB: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    BASE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    W1_STRIDE: tl.constexpr, RANK_STRIDE: tl.constexpr,
    TILES: tl.constexpr, LANES: tl.constexpr, PART_LANES: tl.constexpr, RANK_LANES: tl.constexpr,
):  # fmt: skip
    """Program (b, part): correct TILES * LANES logits and find their best; the row's last program picks the token."""
    b, part = tl.program_id(0), tl.program_id(1)
    base_row = base_logits + b.to(tl.int64) * BASE_STRIDE + SLOT * SLOT_STRIDE
    bias_row = bias + b.to(tl.int64) * VOCAB
    corrected_row = corrected + (b.to(tl.int64) * K + SLOT) * VOCAB
    index = part * TILES * LANES + tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    best_index = index
    for _ in tl.static_range(TILES):
        inside = index < VOCAB
        values = tl.load(base_row + index * COLUMN_STRIDE, mask=inside, other=float("-inf")).to(tl.float32)
        values += tl.load(bias_row + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(corrected_row + index, values, mask=inside)
        best, best_index = keep_better(best, best_index, values, index)
        index += LANES
    key = tl.max(as_key(value_order(best), best_index))
    found = partial + (b * PARTS + part) * 2
    tl.store(found, order_of_key(key))
    tl.store(found + 1, index_of_key(key))

    tl.debug_barrier()
    if tl.atomic_add(arrivals + b, 1, sem="acq_rel") == PARTS - 1:
        parts = tl.arange(0, PART_LANES)
        part_found = partial + (b * PARTS + parts) * 2
        # past L1, which may hold what this processor saw before the other programs wrote
        part_order = tl.load(part_found, mask=parts < PARTS, other=-0x80000000, cache_modifier=".cg")
        part_index = tl.load(part_found + 1, mask=parts < PARTS, other=0x7FFFFFFF, cache_modifier=".cg")
        token = index_of_key(tl.max(as_key(part_order, part_index)))
        tl.store(tokens + b * K + SLOT, token)
        tl.store(arrivals + b, 0)
        r = tl.arange(0, RANK_LANES)
        bits = tl.load(as_bits(w1) + token.to(tl.int64) * W1_STRIDE + r * RANK_STRIDE, mask=r < RANK)
        tl.store(as_bits(previous_rows) + b * RANK + r, bits, mask=r < RANK)


def _launch(slot: int, base_logits: Any, w1: Any) -> Launch:
    num_gen, K, vocab_size = base_logits.shape
    base_stride, slot_stride, column_stride = strides(base_logits)
    w1_stride, rank_stride = strides(w1)
    lanes = power_of_2(vocab_size, at_most=1024)
    tiles = 2 if vocab_size > 2 * lanes else 1
    parts = triton.cdiv(vocab_size, tiles * lanes)
    constexprs = {
        "SLOT": slot,
        "K": K,
        "VOCAB": vocab_size,
        "RANK": w1.shape[1],
        "PARTS": parts,
        "BASE_STRIDE": base_stride,
        "SLOT_STRIDE": slot_stride,
        "COLUMN_STRIDE": column_stride,
        "W1_STRIDE": w1_stride,
        "RANK_STRIDE": rank_stride,
        "TILES": tiles,
        "LANES": lanes,
        "PART_LANES": power_of_2(parts),
        "RANK_LANES": power_of_2(w1.shape[1]),
    }
    return Launch((num_gen, parts), constexprs)


def markov_chain(
    base_logits: torch.Tensor, anchor: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the drafts left to right under the Markov bias, per slot a product and a launch; see `jdspark.ops.markov_chain`."""
    import torch

    contracts.markov_chain(base_logits, anchor, w1, w2)

    num_gen, K, vocab_size = base_logits.shape
    base_logits, w1 = pinned(base_logits), pinned(w1)
    device = base_logits.device
    corrected = torch.empty((num_gen, K, vocab_size), dtype=torch.float32, device=device)
    tokens = torch.empty((num_gen, K), dtype=torch.int32, device=device)
    if num_gen == 0 or K == 0:
        return corrected, tokens
    arrivals = torch.zeros(num_gen, dtype=torch.int32, device=device)
    partial = torch.empty((*_launch(0, base_logits, w1).grid, 2), dtype=torch.int32, device=device)
    previous_rows = w1[anchor.long().clamp(0, w1.shape[0] - 1)]
    for slot in range(K):
        bias = linear(previous_rows, w2)
        inputs = [base_logits, bias, w1, tokens, arrivals]
        outputs = [corrected, tokens, arrivals, previous_rows, partial]
        launch_in_torch(markov_slot_kernel, [*inputs, *outputs], _launch(slot, base_logits, w1))
    return corrected, tokens


def markov_chain_in_jax(base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `jdspark.ops.markov_chain`; the logits are corrected in the base logits' buffer if nobody else needs it."""
    num_gen, K, _ = base_logits.shape
    w1, w2 = jnp.asarray(w1), jnp.asarray(w2)
    corrected = jnp.asarray(base_logits, jnp.float32)
    tokens = jnp.zeros((num_gen, K), jnp.int32)
    if num_gen == 0 or K == 0:
        return corrected, tokens
    arrivals = jnp.zeros(num_gen, jnp.int32)
    previous_rows = w1[safe_tokens(jnp.asarray(anchor), w1.shape[0])]
    for slot in range(K):
        bias = linear_in_jax(previous_rows, w2)
        launch = _launch(slot, base_logits, w1)
        shapes = [corrected, tokens, arrivals, previous_rows]
        outputs = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes)]
        outputs.append(jax.ShapeDtypeStruct((*launch.grid, 2), jnp.int32))
        corrected, tokens, arrivals, previous_rows, _ = launch_in_jax(
            markov_slot_kernel,
            [corrected, bias, w1, tokens, arrivals],
            outputs,
            launch,
            in_place={0: 0, 3: 1, 4: 2},
        )
    return corrected, tokens
