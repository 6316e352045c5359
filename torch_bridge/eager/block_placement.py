from __future__ import annotations

import torch

from jdspark.ops import BlockPlacement, contracts

from .safety import safe_block_counts


def block_placement(
    advertised: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    page_size: int,
    first_row: int = 0,
    block_counts: torch.Tensor | None = None,
) -> BlockPlacement:
    """Pages and offsets of the block's positions; see `jdspark.ops.block_placement`."""
    contracts.block_placement(advertised, block_tables, block_size, page_size, first_row, block_counts)

    num_gen, max_blocks = advertised.shape[0], block_tables.shape[1]
    device = advertised.device
    page_tables = block_tables[first_row : first_row + num_gen].to(torch.int32)
    if block_counts is None:
        owned = torch.full((num_gen,), max_blocks, device=device)
    else:
        owned = safe_block_counts(block_counts[first_row : first_row + num_gen], max_blocks)
    j = torch.arange(block_size, device=device)
    positions = advertised.long().unsqueeze(1) + j
    column = torch.div(positions, page_size, rounding_mode="floor")
    inside = (column >= 0) & (column < owned.unsqueeze(1))
    pages = page_tables.long().gather(1, torch.where(inside, column, 0))
    return BlockPlacement(
        pages=torch.where(inside, pages, -1),
        offsets=positions % page_size,
        upper=(j.unsqueeze(0) > j.unsqueeze(1)).reshape(1, block_size, 1, block_size),
        page_tables=page_tables,
        seq_lens=advertised.long() + block_size,
    )
