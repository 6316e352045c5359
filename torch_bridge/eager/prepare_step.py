from __future__ import annotations

import torch

from jdspark.ops import PreparedStep, contracts

from .advance_ctx_len import advance_ctx_len, advertised_ctx_len
from .block_placement import block_placement
from .gen_prologue import gen_prologue
from .noise_block import noise_block
from .refresh_block_tables import refresh_block_tables
from .store_gen_context import store_destinations


def prepare_step(
    encoded_offsets: torch.Tensor,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    ctx_len: torch.Tensor,
    slots: torch.Tensor,
    *,
    pool_idx: int,
    divisor: int,
    page_size: int,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
    num_contexts: int = 0,
    advance: bool = True,
    embedding: torch.Tensor | None = None,
    mask_row: torch.Tensor | None = None,
) -> PreparedStep:
    """A step's bookkeeping as the chain of its ops, `ctx_len` advanced in place; see `jdspark.ops.prepare_step`."""
    contracts.prepare_step(
        encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
        pool_idx, divisor, page_size, block_size, max_ctx, mask_token_id, num_contexts, embedding, mask_row,
    )  # fmt: skip
    num_gen, width = accepted_tokens.shape
    block_tables, block_counts = refresh_block_tables(
        encoded_offsets, pool_idx=pool_idx, num_seqs=num_contexts + num_gen, divisor=divisor
    )
    prologue = gen_prologue(
        accepted_tokens, num_accepted, ctx_len, slots, block_size=block_size, max_ctx=max_ctx, mask_token_id=mask_token_id
    )
    pages, offsets = store_destinations(
        ctx_len, slots, block_tables[num_contexts:], block_counts[num_contexts:], K=width - 1, page_size=page_size
    )
    place = torch.where(pages < 0, -1, pages * page_size + offsets)
    later = torch.ones(width, width, dtype=torch.bool, device=pages.device).triu(1)
    overwritten = ((place.unsqueeze(2) == place.unsqueeze(1)) & later).any(dim=2)
    room = {"page_size": page_size, "block_size": block_size, "max_ctx": max_ctx}
    if advance:
        ctx_len, advertised = advance_ctx_len(ctx_len, slots, num_accepted, block_counts, **room, first_row=num_contexts)
    else:
        advertised = advertised_ctx_len(ctx_len, slots, block_counts[num_contexts:], **room)
    placement = block_placement(
        advertised,
        block_tables,
        block_size=block_size,
        page_size=page_size,
        first_row=num_contexts,
        block_counts=block_counts,
    )
    store_pages = torch.where(overwritten, -1, pages)
    noise = None
    if embedding is not None:
        noise = noise_block(embedding, prologue.bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    return PreparedStep(block_tables, block_counts, prologue, store_pages, offsets, ctx_len, advertised, placement, noise)
