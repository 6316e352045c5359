from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdspark.ops import BlockPlacement, PreparedStep, Prologue

from .advance_ctx_len import advance_ctx_len, advanced, advertised
from .block_placement import block_placement, place, upper_triangle
from .gen_prologue import gen_prologue, slot_of, write_prologue
from .launch import Ref, ceil_div, launch, struct
from .noise_block import mask_operands, noise_block, write_noise_row
from .refresh_block_tables import CHUNK, count_pages, decode_chunk, refresh_block_tables


@functools.partial(
    jax.jit,
    static_argnames=(
        "pool_idx", "divisor", "page_size", "block_size", "max_ctx", "mask_token_id", "num_contexts",
        "advance",
    ),
)  # fmt: skip
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
) -> PreparedStep:
    """refresh_block_tables, gen_prologue, the store's destinations, advance_ctx_len, block_placement and noise_block in one
    launch.

    Nothing it returns depends on another program's work: who needs a row's count counts for itself and decodes the few offsets
    that it needs. Latents are stored afterwards, by `store_prepared` or `norm_rope_store`.

    Args:
        encoded_offsets: `[pools, seqs, 2, max_blocks]`, context rows first.
        accepted_tokens, num_accepted, slots: gen rows only, `[B, K+1]`, `[B]`, `[B]`.
        ctx_len: `[max_batch + 1]`, before the advance.
        advance: False returns `ctx_len` as it is and advertises its lengths; there are no programs per slot then.
        embedding, mask_row: `[V, H]`, `[H]` or `[1, H]`; without an embedding there is no noise block and no program for it.
    """
    num_gen, width = accepted_tokens.shape
    num_slots, max_blocks = ctx_len.shape[0], encoded_offsets.shape[3]
    num_rows = num_contexts + num_gen
    chunks = ceil_div(max_blocks, CHUNK)
    if num_gen == 0:
        return _without_gen_rows(
            encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
            pool_idx=pool_idx, divisor=divisor, page_size=page_size, block_size=block_size, max_ctx=max_ctx,
            mask_token_id=mask_token_id, num_contexts=num_contexts, advance=advance, embedding=embedding, mask_row=mask_row,
        )  # fmt: skip
    embeddings = () if embedding is None else (embedding, *mask_operands(embedding, mask_row))
    # those that take longest come first
    programs = {
        "count_and_store": num_rows,
        "place_block": num_gen,
        "begin": num_gen,
        "advance_slot": num_slots if advance else 0,
        "decode": num_rows * chunks,
        "noise_row": num_gen * block_size if embeddings else 0,
    }
    optional_outputs: dict[str, jax.ShapeDtypeStruct] = {}
    if advance:
        optional_outputs["ctx_len"] = struct(ctx_len.shape, jnp.int32)
    if embedding is not None:
        optional_outputs["noise"] = struct((num_gen, block_size, embedding.shape[1]), embedding.dtype)
    if num_contexts:
        optional_outputs["page_tables"] = struct((num_gen, max_blocks), jnp.int32)

    def prepare_step_kernel(encoded: Ref, accepted: Ref, num_accepted: Ref, ctx_len: Ref, slots: Ref, *refs: Ref) -> None:
        embeddings_in, outputs = refs[: len(embeddings)], refs[len(embeddings) :]
        (
            block_tables, block_counts, bonus, query_positions, context_positions, embedding_ids,
            store_pages, store_offsets, advertised_lengths, pages, offsets, seq_lens, *rest,
        ) = outputs  # fmt: skip
        optional = dict(zip(optional_outputs, rest, strict=True))

        def row_of(b: jax.Array) -> Ref:
            return encoded.at[pool_idx, num_contexts + b, 0]

        def page_at(b: jax.Array, column: jax.Array) -> jax.Array:
            return lax.div(jnp.maximum(row_of(b)[column], 0), jnp.int32(divisor))

        def count_and_store(row: jax.Array) -> None:
            count = count_pages(encoded.at[pool_idx, row, 0], max_blocks)
            block_counts[row] = count

            @pl.when(row >= num_contexts)
            def _store() -> None:
                b = jnp.maximum(row - num_contexts, 0)
                c = ctx_len[slot_of(slots, b, num_slots)]
                write_store_destinations(b, c, count, functools.partial(page_at, b), store_pages, store_offsets, page_size)

        def place_block(b: jax.Array) -> None:
            slot = slot_of(slots, b, num_slots)
            count = count_pages(row_of(b), max_blocks)
            length = advanced(slot, ctx_len, slots, num_accepted, max_ctx) if advance else ctx_len[slot]
            length = advertised(length, count, page_size=page_size, block_size=block_size, max_ctx=max_ctx)
            # no store before the last load: nobody knows that they are of different arrays
            places = [place(length + j, count, functools.partial(page_at, b), page_size) for j in range(block_size)]
            for j, of_token in enumerate(places):
                pages[b, j], offsets[b, j] = of_token
            advertised_lengths[b], seq_lens[b] = length, length + block_size

        def begin(b: jax.Array) -> None:
            c = ctx_len[slot_of(slots, b, num_slots)]
            write_prologue(b, accepted, num_accepted[b], c, bonus, query_positions, context_positions, embedding_ids, max_ctx)

            @pl.when(b == 0)
            def _mask() -> None:
                embedding_ids[num_gen] = jnp.int32(mask_token_id)

        def advance_slot(slot: jax.Array) -> None:
            optional["ctx_len"][slot] = advanced(slot, ctx_len, slots, num_accepted, max_ctx)

        def decode(part: jax.Array) -> None:
            row, chunk = part // chunks, part % chunks
            encoded_row = encoded.at[pool_idx, row, 0]
            decode_chunk(encoded_row, block_tables.at[row], chunk, max_blocks, divisor)
            if num_contexts:

                @pl.when(row >= num_contexts)
                def _gen_row() -> None:
                    b = jnp.maximum(row - num_contexts, 0)
                    decode_chunk(encoded_row, optional["page_tables"].at[b], chunk, max_blocks, divisor)

        def noise_row(part: jax.Array) -> None:
            embedding, *masks = embeddings_in
            b, j = part // block_size, part % block_size
            bonus = accepted[b, jnp.clip(num_accepted[b], 1, width) - 1]
            write_noise_row(embedding, masks, optional["noise"], b, j, bonus, mask_token_id)

        program, first = lax.axis_index("program"), 0
        for act in (count_and_store, place_block, begin, advance_slot, decode, noise_row):
            if count := programs[act.__name__]:
                here = (program >= first) & (program < first + count)
                pl.when(here)(functools.partial(act, jnp.maximum(program - first, 0)))
            first += count

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return struct(shape, jnp.int32)

    (
        block_tables, block_counts, bonus, query_positions, context_positions, embedding_ids,
        store_pages, store_offsets, advertised_lengths, pages, offsets, seq_lens, *rest,
    ) = launch(
        prepare_step_kernel,
        out_type=(
            ints(num_rows, max_blocks), ints(num_rows),
            ints(num_gen), ints(num_gen, block_size), ints(num_gen, width), ints(num_gen + 1),
            ints(num_gen, width), ints(num_gen, width),
            ints(num_gen),
            ints(num_gen, block_size), ints(num_gen, block_size), ints(num_gen),
            *optional_outputs.values(),
        ),
        grid={"program": sum(programs.values())},
    )(encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots, *embeddings)  # fmt: skip
    optional = dict(zip(optional_outputs, rest, strict=True))
    return PreparedStep(
        block_tables,
        block_counts,
        Prologue(bonus, query_positions, context_positions, embedding_ids),
        store_pages,
        store_offsets,
        optional.get("ctx_len", ctx_len),
        advertised_lengths,
        BlockPlacement(pages, offsets, upper_triangle(block_size), optional.get("page_tables", block_tables), seq_lens),
        optional.get("noise"),
    )


def write_store_destinations(
    b: jax.Array,
    c: jax.Array,
    count: jax.Array,
    page_at: Callable[[jax.Array], jax.Array],
    store_pages: Ref,
    store_offsets: Ref,
    page_size: int,
) -> None:
    """Request b's destinations, from its context length `c` and its page count."""
    width = store_pages.shape[1]
    last = count * page_size - 1
    # min(c, last) first: the same numbers, and c + j cannot overflow
    start = jnp.minimum(c, last)
    places = []
    for j in range(width):
        position = jnp.maximum(jnp.minimum(start + j, last), 0)
        places.append((page_at(position // page_size), position % page_size))
    for j, (page, offset) in enumerate(places):
        lost = count == 0
        for later_page, later_offset in places[j + 1 :]:
            lost |= (later_page == page) & (later_offset == offset)
        store_pages[b, j] = jnp.where(lost, -1, page)
        store_offsets[b, j] = offset


def _without_gen_rows(
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
    num_contexts: int,
    advance: bool,
    embedding: jax.Array | None,
    mask_row: jax.Array | None,
) -> PreparedStep:
    """A batch of context rows alone: only its tables have to be decoded."""
    tables, counts = refresh_block_tables(encoded_offsets, pool_idx=pool_idx, num_seqs=num_contexts, divisor=divisor)
    new_ctx_len, lengths = advance_ctx_len(
        ctx_len, slots, num_accepted, counts,
        page_size=page_size, block_size=block_size, max_ctx=max_ctx, first_row=num_contexts,
    )  # fmt: skip
    prologue = gen_prologue(
        accepted_tokens, num_accepted, ctx_len, slots, block_size=block_size, max_ctx=max_ctx, mask_token_id=mask_token_id
    )
    noise = None
    if embedding is not None:
        noise = noise_block(embedding, prologue.bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    return PreparedStep(
        tables,
        counts,
        prologue,
        jnp.zeros(accepted_tokens.shape, jnp.int32),
        jnp.zeros(accepted_tokens.shape, jnp.int32),
        new_ctx_len if advance else ctx_len,
        lengths,
        block_placement(lengths, tables, block_size=block_size, page_size=page_size, first_row=num_contexts),
        noise,
    )
