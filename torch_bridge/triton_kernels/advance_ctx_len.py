from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .safety import clip, safe_slots

if TYPE_CHECKING:
    import torch


@triton.jit
def advanced_length(  # type: ignore[no-untyped-def]
    c, slot, slots, num_accepted, NUM_GEN: tl.constexpr, DUMMY: tl.constexpr, MAX_CTX: tl.constexpr, REQUESTS: tl.constexpr
):
    """What `ctx_len` of these slots becomes from `c`: all requests of a slot add to it, and the dummy's is 0."""
    added = tl.zeros(slot.shape, tl.int64)
    for start in range(0, NUM_GEN, REQUESTS):
        b = start + tl.arange(0, REQUESTS)
        n = clip(tl.load(num_accepted + b, mask=b < NUM_GEN, other=0), 1, MAX_CTX).to(tl.int64)
        other = safe_slots(tl.load(slots + b, mask=b < NUM_GEN, other=0), DUMMY)
        shares = (slot[:, None] == other[None, :]) & (b < NUM_GEN)[None, :]
        added += tl.sum(tl.where(shares, n[None, :], 0), axis=1)
    advanced = tl.minimum(tl.minimum(c, MAX_CTX).to(tl.int64) + added, MAX_CTX)
    return tl.where(slot == DUMMY, 0, advanced).to(tl.int32)


@triton.jit
def advertised_length(  # type: ignore[no-untyped-def]
    c, count, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAX_CTX: tl.constexpr
):
    """`min(c, max(count*P - block_size, 0))`: the block's own latents need room behind the context."""
    # more pages than MAX_CTX and the block fill change nothing; the clip keeps the product inside int32
    room = clip(count, 0, (MAX_CTX + BLOCK_SIZE) // PAGE_SIZE + 1) * PAGE_SIZE - BLOCK_SIZE
    return tl.minimum(c, tl.maximum(room, 0))


@triton.jit
def advance_ctx_len_kernel(  # type: ignore[no-untyped-def]
    ctx_len,  # [max_batch + 1]
    slots,  # [B]
    num_accepted,  # [B]
    block_counts,  # [rows]
    new_ctx_len,  # [max_batch + 1] out; may be ctx_len itself
    advertised,  # [B] out
    NUM_GEN: tl.constexpr, DUMMY: tl.constexpr, CTX_STRIDE: tl.constexpr, FIRST_ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAX_CTX: tl.constexpr, REQUESTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program does all: every slot's old length is read before any is written."""
    for start in range(0, NUM_GEN, REQUESTS):
        b = start + tl.arange(0, REQUESTS)
        inside = b < NUM_GEN
        slot = safe_slots(tl.load(slots + b, mask=inside, other=0), DUMMY)
        c = advanced_length(tl.load(ctx_len + slot * CTX_STRIDE), slot, slots, num_accepted, NUM_GEN, DUMMY, MAX_CTX, REQUESTS)
        count = tl.load(block_counts + FIRST_ROW + b, mask=inside, other=0)
        tl.store(advertised + b, advertised_length(c, count, PAGE_SIZE, BLOCK_SIZE, MAX_CTX), mask=inside)
    tl.debug_barrier()
    for start in range(0, DUMMY + 1, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot <= DUMMY
        c = tl.load(ctx_len + slot * CTX_STRIDE, mask=inside, other=0)
        c = advanced_length(c, slot, slots, num_accepted, NUM_GEN, DUMMY, MAX_CTX, REQUESTS)
        tl.debug_barrier()  # several threads may have loaded one element
        tl.store(new_ctx_len + slot * CTX_STRIDE, c, mask=inside)


def _launch(ctx_len: Any, slots: Any, *, page_size: int, block_size: int, max_ctx: int, first_row: int) -> Launch:
    num_gen, num_slots = slots.shape[0], ctx_len.shape[0]
    constexprs = {
        "NUM_GEN": num_gen,
        "DUMMY": num_slots - 1,
        "CTX_STRIDE": strides(ctx_len)[0],
        "FIRST_ROW": first_row,
        "PAGE_SIZE": page_size,
        "BLOCK_SIZE": block_size,
        "MAX_CTX": max_ctx,
        "REQUESTS": power_of_2(num_gen, at_most=32),
        "SLOTS": power_of_2(num_slots, at_most=256),
    }
    return Launch((1,), constexprs)


def advance_ctx_len(
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    num_accepted: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    max_ctx: int,
    first_row: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the accepted tokens into `ctx_len`, in place, one launch; see `jdspark.ops.advance_ctx_len`."""
    import torch

    contracts.advance_ctx_len(ctx_len, slots, num_accepted, block_counts, page_size, block_size, max_ctx, first_row)

    advertised = torch.empty(slots.shape, dtype=torch.int32, device=ctx_len.device)
    launch = _launch(ctx_len, slots, page_size=page_size, block_size=block_size, max_ctx=max_ctx, first_row=first_row)
    arrays = [ctx_len, slots.contiguous(), num_accepted.contiguous(), block_counts.contiguous(), ctx_len, advertised]
    launch_in_torch(advance_ctx_len_kernel, arrays, launch)
    return ctx_len, advertised


def advance_ctx_len_in_jax(
    ctx_len: jax.Array,
    slots: jax.Array,
    num_accepted: jax.Array,
    block_counts: jax.Array,
    *,
    page_size: int,
    block_size: int,
    max_ctx: int,
    first_row: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """See `jdspark.ops.advance_ctx_len`."""
    inputs = [jnp.asarray(operand) for operand in (ctx_len, slots, num_accepted, block_counts)]
    launch = _launch(ctx_len, slots, page_size=page_size, block_size=block_size, max_ctx=max_ctx, first_row=first_row)
    outputs = [jax.ShapeDtypeStruct(operand.shape, jnp.int32) for operand in inputs[:2]]
    new_ctx_len, advertised = launch_in_jax(advance_ctx_len_kernel, inputs, outputs, launch)
    return new_ctx_len, advertised
