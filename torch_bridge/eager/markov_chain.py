from __future__ import annotations

import torch

from jdspark.ops import contracts

from .safety import safe_tokens


def markov_chain(
    base_logits: torch.Tensor, anchor: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the drafts left to right under the Markov bias; see `jdspark.ops.markov_chain`."""
    contracts.markov_chain(base_logits, anchor, w1, w2)

    num_gen, K, _ = base_logits.shape
    corrected = base_logits.float().clone()
    tokens = torch.zeros((num_gen, K), dtype=torch.int32, device=base_logits.device)
    previous = anchor
    for i in range(K):
        corrected[:, i] += (w1[safe_tokens(previous, w1.shape[0])] @ w2.T).float()
        previous = corrected[:, i].argmax(dim=-1)
        tokens[:, i] = previous.to(torch.int32)
    return corrected, tokens
