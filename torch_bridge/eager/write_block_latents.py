from __future__ import annotations

import torch

from jdspark.ops import BlockPlacement, contracts
from jdspark.ops.checks import Layout

from .latent_pool import write_latents


def write_block_latents(
    pool: torch.Tensor,
    block_latents: torch.Tensor,
    placement: BlockPlacement,
    *,
    layout: Layout = "layer_major",
    layer: int | None = None,
) -> torch.Tensor:
    """Write the block's own latents in place; see `jdspark.ops.write_block_latents`."""
    contracts.write_block_latents(pool, block_latents, placement, layout, layer)
    num_gen, block_size = placement.pages.shape
    if num_gen == 0:
        return pool

    rows = block_latents.movedim(0, 2) if layer is None else block_latents
    rows = rows.reshape(num_gen * block_size, *rows.shape[2:])
    write_latents(pool, rows, placement.pages.long().reshape(-1), placement.offsets.long().reshape(-1), layout, layer)
    return pool
