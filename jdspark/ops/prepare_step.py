from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import contracts
from .advance_ctx_len import advance_ctx_len, advertised_ctx_len
from .backends import kernel
from .block_placement import BlockPlacement, block_placement
from .checks import Array
from .gen_prologue import Prologue, gen_prologue
from .noise_block import noise_block
from .refresh_block_tables import refresh_block_tables
from .safety import gen_slice
from .store_gen_context import store_destinations


class PreparedStep(NamedTuple):
    """All that a decode step knows about its gen requests before it touches the pool; int32 but for `placement.upper`
    and `noise`."""

    block_tables: Array
    """`[num_contexts + B, max_blocks]`"""
    block_counts: Array
    """`[num_contexts + B]`"""
    prologue: Prologue
    store_pages: Array
    """`[B, K+1]`: the page of each verified token; -1 where it writes nothing, because its request owns no page or a later
    token of the same request goes to the same place."""
    store_offsets: Array
    """`[B, K+1]`, inside the page."""
    ctx_len: Array
    """`[max_batch + 1]`, advanced."""
    advertised: Array
    """`[B]`"""
    placement: BlockPlacement
    noise: Array = None
    """`[B, block_size, H]` in the embedding's dtype: the drafter's input; None without an embedding."""


def prepare_step(
    encoded_offsets: jax.Array,
    accepted_tokens: jax.Array,
    num_accepted: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    *,
    pool_idx: int,
    divisor: int,
    page_size: int,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
    num_contexts: int = 0,
    advance: bool = True,
    embedding: jax.Array | None = None,
    mask_row: jax.Array | None = None,
    backend: str = "xla",
) -> PreparedStep:
    """The bookkeeping of a step in one op: page tables, prologue, the store's destinations, lengths, block placement,
    and with an `embedding` the noise block.

    Each part is the op of its name; fused backends launch one kernel. Latents follow with `store_prepared` or
    `norm_rope_store`.

    Args:
        encoded_offsets: `[pools, seqs, 2, max_blocks]` int32, `num_contexts` context rows first.
        accepted_tokens, num_accepted, slots: gen rows only, `[B, K+1]`, `[B]`, `[B]` int32.
        ctx_len: `[max_batch + 1]` int32, before this step's advance.
        advance: False leaves `ctx_len` alone and advertises its lengths as they are: a step that stores no context. Static.
        embedding, mask_row: of `noise_block`; None for a step that drafts nothing.

    Raises:
        TypeError, ValueError: as the ops it is made of.
    """
    contracts.prepare_step(
        encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
        pool_idx, divisor, page_size, block_size, max_ctx, mask_token_id, num_contexts, embedding, mask_row,
    )  # fmt: skip
    if backend != "xla":
        return kernel("prepare_step", backend)(
            encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
            pool_idx=pool_idx, divisor=divisor, page_size=page_size, block_size=block_size, max_ctx=max_ctx,
            mask_token_id=mask_token_id, num_contexts=num_contexts, advance=advance, embedding=embedding, mask_row=mask_row,
        )  # fmt: skip

    num_gen, width = accepted_tokens.shape
    block_tables, block_counts = refresh_block_tables(
        encoded_offsets, pool_idx=pool_idx, num_seqs=num_contexts + num_gen, divisor=divisor
    )
    prologue = gen_prologue(
        accepted_tokens, num_accepted, ctx_len, slots, block_size=block_size, max_ctx=max_ctx, mask_token_id=mask_token_id
    )
    gen_tables, gen_counts = (gen_slice(x, num_contexts, num_gen) for x in (block_tables, block_counts))
    pages, offsets = store_destinations(ctx_len, slots, gen_tables, gen_counts, K=width - 1, page_size=page_size)
    place = jnp.where(pages < 0, -1, pages * page_size + offsets)
    same = place[:, :, None] == place[:, None, :]
    overwritten = jnp.any(same & jnp.triu(jnp.ones((width, width), bool), k=1), axis=2)
    if advance:
        ctx_len, advertised = advance_ctx_len(
            ctx_len, slots, num_accepted, block_counts,
            page_size=page_size, block_size=block_size, max_ctx=max_ctx, first_row=num_contexts,
        )  # fmt: skip
    else:
        advertised = advertised_ctx_len(ctx_len, slots, gen_counts, page_size=page_size, block_size=block_size, max_ctx=max_ctx)
    placement = block_placement(
        advertised,
        block_tables,
        block_size=block_size,
        page_size=page_size,
        first_row=num_contexts,
        block_counts=block_counts,
    )
    store_pages = jnp.where(overwritten, -1, pages)
    noise = None
    if embedding is not None:
        noise = noise_block(embedding, prologue.bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    return PreparedStep(block_tables, block_counts, prologue, store_pages, offsets, ctx_len, advertised, placement, noise)
