from __future__ import annotations

import torch

from jdspark.ops import contracts
from jdspark.ops.checks import Layout

from .latent_pool import write_latents


def scatter_context(
    pool: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Write each token's latents in place at its page; see `jdspark.ops.scatter_context`."""
    contracts.scatter_context(pool, latents, rows, positions, block_tables, layout)
    if rows.shape[0] == 0:
        return pool

    num_rows, max_blocks = block_tables.shape
    page_size = pool.shape[2]
    rows, positions = rows.long(), positions.long()
    column = torch.div(positions, page_size, rounding_mode="floor")
    inside = (rows >= 0) & (rows < num_rows) & (column >= 0) & (column < max_blocks)
    page = block_tables.long()[torch.where(inside, rows, 0), torch.where(inside, column, 0)]
    write_latents(pool, latents, torch.where(inside, page, -1), positions % page_size, layout)
    return pool
