from __future__ import annotations

import torch

from jdspark.ops import Prologue, contracts

from .safety import safe_num_accepted, safe_slots


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
    """Bonus token, positions and embedding ids of the gen rows; see `jdspark.ops.gen_prologue`."""
    contracts.gen_prologue(accepted_tokens, num_accepted, ctx_len, slots, block_size, max_ctx, mask_token_id)

    width = accepted_tokens.shape[1]
    device = accepted_tokens.device
    n = safe_num_accepted(num_accepted, width - 1)
    c = ctx_len[safe_slots(slots, ctx_len)].long()
    bonus = accepted_tokens.gather(1, (n - 1).unsqueeze(1)).squeeze(1).long()
    block_start = (c + n).clamp(max=max_ctx)
    return Prologue(
        bonus=bonus,
        query_positions=block_start.unsqueeze(1) + torch.arange(block_size, device=device),
        context_positions=c.unsqueeze(1) + torch.arange(width, device=device),
        embedding_ids=torch.cat([bonus, torch.full((1,), mask_token_id, device=device)]),
    )
