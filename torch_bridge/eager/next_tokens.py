from __future__ import annotations

import torch

from jdspark.ops import contracts

from .safety import safe_num_accepted


def next_tokens(accepted_tokens: torch.Tensor, num_accepted: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """What the target verifies next, `[rows, K+1]` int32; see `jdspark.ops.next_tokens`."""
    num_contexts = contracts.next_tokens(accepted_tokens, num_accepted, draft_tokens)

    rows, width = accepted_tokens.shape
    n = safe_num_accepted(num_accepted, width - 1)
    upcoming = torch.zeros((rows, width), dtype=torch.int32, device=accepted_tokens.device)
    upcoming[:, :1] = accepted_tokens.gather(1, (n - 1).unsqueeze(1)).to(torch.int32)
    upcoming[num_contexts:, 1:] = draft_tokens.to(torch.int32)
    return upcoming
