"""Device values made safe, as in `jdspark.ops.safety`; int64 throughout, as torch indexes."""

from __future__ import annotations

import torch


def safe_slots(slots: torch.Tensor, ctx_len: torch.Tensor) -> torch.Tensor:
    """Slots `[B]` with everything outside `[0, max_batch]` replaced by the dummy slot, the last row of `ctx_len`."""
    dummy = ctx_len.shape[0] - 1
    slots = slots.long()
    return torch.where((slots < 0) | (slots > dummy), dummy, slots)


def safe_num_accepted(num_accepted: torch.Tensor, K: int) -> torch.Tensor:
    """Accepted counts clipped to `1..K+1`."""
    return num_accepted.long().clamp(1, K + 1)


def safe_tokens(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token ids clipped to `[0, V)`."""
    return tokens.long().clamp(0, vocab_size - 1)


def safe_block_counts(block_counts: torch.Tensor, max_blocks: int) -> torch.Tensor:
    """Page counts clipped to what the table can name, `[0, max_blocks]`."""
    return block_counts.long().clamp(0, max_blocks)
