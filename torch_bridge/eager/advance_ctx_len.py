from __future__ import annotations

import torch

from jdspark.ops import contracts

from .safety import safe_slots


def advertised_ctx_len(
    ctx_len: torch.Tensor, slots: torch.Tensor, block_counts: torch.Tensor, *, page_size: int, block_size: int, max_ctx: int
) -> torch.Tensor:
    """What the block may attend to, `[B]` int64; see `jdspark.ops.advance_ctx_len`. `block_counts` of the gen rows."""
    allocated = (block_counts.long().clamp(min=0) * page_size - block_size).clamp(min=0)
    return torch.minimum(ctx_len[safe_slots(slots, ctx_len)].long(), allocated)


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
    """Count the accepted tokens into `ctx_len`, in place, and the advertised lengths; see `jdspark.ops.advance_ctx_len`."""
    contracts.advance_ctx_len(ctx_len, slots, num_accepted, block_counts, page_size, block_size, max_ctx, first_row)

    num_gen = slots.shape[0]
    ctx_len.clamp_(max=max_ctx)  # before the add as well: the same number, and an int32 sum cannot overflow
    ctx_len.index_add_(0, safe_slots(slots, ctx_len), num_accepted.clamp(1, max(max_ctx, 1)).to(ctx_len.dtype))
    ctx_len.clamp_(max=max_ctx)
    ctx_len[-1:].zero_()
    advertised = advertised_ctx_len(
        ctx_len,
        slots,
        block_counts[first_row : first_row + num_gen],
        page_size=page_size,
        block_size=block_size,
        max_ctx=max_ctx,
    )
    return ctx_len, advertised
