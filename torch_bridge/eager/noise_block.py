from __future__ import annotations

import torch

from jdspark.ops import contracts

from .safety import safe_tokens


def noise_block(
    embedding: torch.Tensor,
    bonus: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    mask_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """Embedded bonus token, then the mask row in every other slot; see `jdspark.ops.noise_block`."""
    contracts.noise_block(embedding, bonus, block_size, mask_token_id, mask_row)

    vocab_size, hidden = embedding.shape
    mask = embedding[mask_token_id] if mask_row is None else mask_row.reshape(hidden).to(embedding.dtype)
    block = mask.expand(bonus.shape[0], block_size, hidden).clone()
    block[:, 0] = embedding[safe_tokens(bonus, vocab_size)]
    return block
