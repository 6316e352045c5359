from __future__ import annotations

import numpy as np
import torch

from jdspark.ops import contracts
from jdspark.ops.accept_strict import FORCE_POOL_SIZE, force_pool, split_force


def forced_num_accepted(
    force: float, force_counter: torch.Tensor | int, num_gen: int, K: int, device: torch.device
) -> torch.Tensor:
    """`[B]` int64 accepted counts of a forced step, `force_counter` being the counter after it went up."""
    whole, fraction = split_force(force)
    total = min(whole + 1, K + 1)
    extra = torch.zeros(num_gen, dtype=torch.int64, device=device)
    if fraction and total < K + 1:
        counter = torch.as_tensor(force_counter, device=device).long()
        index = (counter * 1000003 + torch.arange(num_gen, device=device) * 7919) % FORCE_POOL_SIZE
        uniforms = torch.from_numpy(force_pool().copy()).to(device)[index]
        extra = (uniforms < float(np.float32(fraction))).long()
    return total + extra


def accept_strict(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    num_contexts: int = 0,
    force: float = 0.0,
    force_counter: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's argmax at every position and how many drafts agree; see `jdspark.ops.accept_strict`."""
    contracts.accept_strict(logits, draft_tokens, num_contexts, force)

    num_gen, K = draft_tokens.shape
    target_tokens = logits.argmax(dim=-1).to(torch.int32)
    context_tokens = target_tokens[:num_contexts]
    gen_tokens = target_tokens[num_contexts:].reshape(num_gen, K + 1)
    matches = (draft_tokens == gen_tokens[:, :K]).int()
    gen_accepted = 1 + matches.cumprod(dim=1).sum(dim=1)
    if force > 0:
        counter = torch.as_tensor(force_counter, device=logits.device).long() + 1
        gen_accepted = forced_num_accepted(force, counter, num_gen, K, logits.device)

    accepted_tokens = torch.zeros((num_contexts + num_gen, K + 1), dtype=torch.int32, device=logits.device)
    accepted_tokens[:num_contexts, 0] = context_tokens
    accepted_tokens[num_contexts:] = gen_tokens
    num_accepted = torch.ones(num_contexts + num_gen, dtype=torch.int32, device=logits.device)
    num_accepted[num_contexts:] = gen_accepted.to(torch.int32)
    return accepted_tokens, num_accepted
