from __future__ import annotations

import torch

from jdspark.ops import contracts
from jdspark.ops.checks import Layout, pool_dims


def block_attention(
    query: torch.Tensor,
    block_latents: torch.Tensor,
    pool: torch.Tensor,
    page_tables: torch.Tensor,
    advertised: torch.Tensor,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout = "layer_major",
) -> torch.Tensor:
    """Absorbed MLA attention over the stored context and the whole block; see `jdspark.ops.block_attention`."""
    contracts.block_attention(query, block_latents, pool, page_tables, advertised, layer, kv_lora_rank, layout)

    num_gen, block_size = query.shape[:2]
    _, num_pages, page_size, _ = pool_dims("block_attention", pool, layout)
    page_tables = page_tables.long()
    exists = (page_tables >= 0) & (page_tables < num_pages)
    of_layer = pool[layer] if layout == "layer_major" else pool[:, layer]
    context = of_layer[torch.where(exists, page_tables, 0)].flatten(1, 2)
    exists = exists.repeat_interleave(page_size, dim=1)
    in_context = exists & (torch.arange(context.shape[1], device=pool.device) < advertised.unsqueeze(1))
    keys = torch.cat([context.masked_fill(~in_context.unsqueeze(-1), 0), block_latents], dim=1).float()
    visible = torch.cat([in_context, in_context.new_ones(num_gen, block_size)], dim=1)

    scores = torch.einsum("bthd,bkd->bthk", query.float(), keys) * scale
    weights = scores.masked_fill(~visible[:, None, None, :], float("-inf")).softmax(dim=-1)
    return torch.einsum("bthk,bkr->bthr", weights, keys[..., :kv_lora_rank]).to(query.dtype)
