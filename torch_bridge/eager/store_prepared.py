from __future__ import annotations

import torch

from jdspark.ops import contracts
from jdspark.ops.checks import Layout

from .latent_pool import write_latents
from .store_gen_context import kept_or_zeroed


def store_prepared(
    pool: torch.Tensor,
    latents: torch.Tensor,
    num_accepted: torch.Tensor,
    store_pages: torch.Tensor,
    store_offsets: torch.Tensor,
    *,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Store the verified tokens' latents in place, where `prepare_step` said; see `jdspark.ops.store_prepared`."""
    contracts.store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout)
    if store_pages.shape[0] == 0:
        return pool

    values = kept_or_zeroed(latents, num_accepted, store_pages.shape[1] - 1)
    write_latents(pool, values, store_pages.long().reshape(-1), store_offsets.long().reshape(-1), layout)
    return pool
