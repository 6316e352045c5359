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

    tables = block_tables[first_row : first_row + num_gen].long()
    counts = safe_block_counts(block_counts[first_row : first_row + num_gen], tables.shape[1]).unsqueeze(1)
    n = safe_num_accepted(num_accepted, K).unsqueeze(1)
    c = ctx_len[safe_slots(slots, ctx_len)].long().unsqueeze(1)
    j = torch.arange(K + 1, device=pool.device)

    column = torch.minimum(c + j, counts * page_size - 1).clamp(min=0)
    page = tables.gather(1, torch.div(column, page_size, rounding_mode="floor"))
    page = torch.where(counts == 0, -1, page)
    # a real product with zero: a zero of the latent's sign, or NaN where the latent is not finite
    values = torch.where((j < n).reshape(-1, 1, 1), latents, latents * 0)
    write_latents(pool, values, page.reshape(-1), (column % page_size).reshape(-1), layout)
    return pool
