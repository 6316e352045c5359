from __future__ import annotations

import torch

from jdspark.ops import contracts


def refresh_block_tables(
    encoded_offsets: torch.Tensor, *, pool_idx: int, num_seqs: int, divisor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode the page manager's table of one pool; see `jdspark.ops.refresh_block_tables`. Strides are free."""
    contracts.refresh_block_tables(encoded_offsets, pool_idx, num_seqs, divisor)

    encoded = encoded_offsets[pool_idx, :num_seqs, 0]
    block_counts = (encoded >= 0).sum(dim=1).to(torch.int32)
    block_tables = torch.div(encoded.clamp(min=0), divisor, rounding_mode="floor")
    return block_tables, block_counts
