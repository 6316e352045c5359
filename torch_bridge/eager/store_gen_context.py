from __future__ import annotations

import torch

from jdspark.ops import contracts
from jdspark.ops.checks import Layout

from .latent_pool import write_latents
from .safety import safe_block_counts, safe_num_accepted, safe_slots


def store_gen_context(
    pool: torch.Tensor,
    latents: torch.Tensor,
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    num_accepted: torch.Tensor,
    block_tables: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    layout: Layout = "layer_major",
    first_row: int = 0,
) -> torch.Tensor:
    """Store the verified tokens' latents in place, rejected ones times zero; see `jdspark.ops.store_gen_context`."""
    K = contracts.store_gen_context(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout, first_row)
    num_gen, page_size = slots.shape[0], pool.shape[2]
    if num_gen == 0:
        return pool

    tables, counts = (x[first_row : first_row + num_gen] for x in (block_tables, block_counts))
    pages, offsets = store_destinations(ctx_len, slots, tables, counts, K=K, page_size=page_size)
    write_latents(pool, kept_or_zeroed(latents, num_accepted, K), pages.reshape(-1), offsets.reshape(-1), layout)
    return pool


def store_destinations(
    ctx_len: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, counts: torch.Tensor, *, K: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets `[B, K+1]` of the verified tokens, from the gen rows' tables; page -1 where a row owns no page."""
    counts = safe_block_counts(counts, tables.shape[1]).unsqueeze(1)
    c = ctx_len[safe_slots(slots, ctx_len)].long().unsqueeze(1)
    column = torch.minimum(c + torch.arange(K + 1, device=ctx_len.device), counts * page_size - 1).clamp(min=0)
    page = tables.long().gather(1, torch.div(column, page_size, rounding_mode="floor"))
    return torch.where(counts == 0, -1, page), column % page_size


def kept_or_zeroed(latents: torch.Tensor, num_accepted: torch.Tensor, K: int) -> torch.Tensor:
    """The accepted tokens' latents as they are, the rejected ones times zero."""
    n = safe_num_accepted(num_accepted, K).unsqueeze(1)
    accepted = torch.arange(K + 1, device=latents.device) < n
    # a real product: a zero of the latent's sign, or NaN where the latent is not finite
    return torch.where(accepted.reshape(-1, 1, 1), latents, latents * 0)
