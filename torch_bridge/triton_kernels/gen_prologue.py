from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import Prologue, contracts

from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .safety import clip, safe_slots

if TYPE_CHECKING:
    import torch


@triton.jit
def gen_prologue_kernel(  # type: ignore[no-untyped-def]
    accepted_tokens,  # [B, K+1]
    num_accepted,  # [B]
    ctx_len,  # [max_batch + 1]
    slots,  # [B]
    bonus,  # [B] out
    query_positions,  # [B, block_size] out
    context_positions,  # [B, K+1] out
    embedding_ids,  # [B+1] out
    ROW_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, WIDTH: tl.constexpr, DUMMY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MAX_CTX: tl.constexpr, MASK_TOKEN_ID: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (b): one request's bonus token and positions; the last program also appends the mask token."""
    b = tl.program_id(0)
    n = clip(tl.load(num_accepted + b), 1, WIDTH)
    c = tl.load(ctx_len + safe_slots(tl.load(slots + b), DUMMY)).to(tl.int32)
    token = tl.load(accepted_tokens + b.to(tl.int64) * ROW_STRIDE + (n - 1) * TOKEN_STRIDE).to(tl.int32)
    tl.store(bonus + b, token)
    tl.store(embedding_ids + b, token)
    if b == tl.num_programs(0) - 1:
        tl.store(embedding_ids + b + 1, MASK_TOKEN_ID)

    j = tl.arange(0, LANES)
    # min(c, MAX_CTX) first: the same number, and c + n cannot overflow
    block_start = tl.minimum(tl.minimum(c, MAX_CTX) + n, MAX_CTX)
    tl.store(query_positions + b * BLOCK_SIZE + j, block_start + j, mask=j < BLOCK_SIZE)
    tl.store(context_positions + b * WIDTH + j, c + j, mask=j < WIDTH)


def _launch(accepted_tokens: Any, ctx_len: Any, block_size: int, max_ctx: int, mask_token_id: int) -> Launch:
    num_gen, width = accepted_tokens.shape
    row_stride, token_stride = strides(accepted_tokens)
    constexprs = {
        "ROW_STRIDE": row_stride,
        "TOKEN_STRIDE": token_stride,
        "WIDTH": width,
        "DUMMY": ctx_len.shape[0] - 1,
        "BLOCK_SIZE": block_size,
        "MAX_CTX": max_ctx,
        "MASK_TOKEN_ID": mask_token_id,
        "LANES": power_of_2(max(width, block_size)),
    }
    return Launch((num_gen,), constexprs, num_warps=1)


def gen_prologue(
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
) -> Prologue:
    """Bonus token, positions and embedding ids of the gen rows, int32, one launch; see `jdspark.ops.gen_prologue`."""
    import torch

    contracts.gen_prologue(accepted_tokens, num_accepted, ctx_len, slots, block_size, max_ctx, mask_token_id)
    num_gen, width = accepted_tokens.shape
    outputs = Prologue(
        bonus=accepted_tokens.new_empty(num_gen, dtype=torch.int32),
        query_positions=accepted_tokens.new_empty((num_gen, block_size), dtype=torch.int32),
        context_positions=accepted_tokens.new_empty((num_gen, width), dtype=torch.int32),
        embedding_ids=accepted_tokens.new_empty(num_gen + 1, dtype=torch.int32),
    )
    if num_gen == 0:
        outputs.embedding_ids.fill_(mask_token_id)
    inputs = [accepted_tokens, num_accepted.contiguous(), ctx_len.contiguous(), slots.contiguous()]
    launch = _launch(accepted_tokens, ctx_len, block_size, max_ctx, mask_token_id)
    launch_in_torch(gen_prologue_kernel, [*inputs, *outputs], launch)
    return outputs


def gen_prologue_in_jax(
    accepted_tokens: jax.Array,
    num_accepted: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    *,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
) -> Prologue:
    """See `jdspark.ops.gen_prologue`."""
    num_gen, width = accepted_tokens.shape
    shapes = ((num_gen,), (num_gen, block_size), (num_gen, width), (num_gen + 1,))
    if num_gen == 0:
        return Prologue(*[jnp.full(shape, mask_token_id, jnp.int32) for shape in shapes])
    inputs = [jnp.asarray(operand) for operand in (accepted_tokens, num_accepted, ctx_len, slots)]
    launch = _launch(inputs[0], ctx_len, block_size, max_ctx, mask_token_id)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    return Prologue(*launch_in_jax(gen_prologue_kernel, inputs, outputs, launch))
