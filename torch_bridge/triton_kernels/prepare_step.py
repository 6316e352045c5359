from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark import ops
from jdspark.ops import BlockPlacement, PreparedStep, Prologue, contracts

from .advance_ctx_len import advanced_length, advertised_length
from .latent_pool import overwrites
from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .noise_block import noise_block, noise_block_in_jax
from .safety import clip, floor_remainder, safe_slots
from .store_gen_context import context_column

if TYPE_CHECKING:
    import torch


@triton.jit
def _decoded_page(  # type: ignore[no-untyped-def]
    encoded_row, column, owned, COLUMN_STRIDE: tl.constexpr, DIVISOR: tl.constexpr
):
    """The page of this column as `refresh_block_tables` decodes it, -1 where the request owns none."""
    encoded = tl.load(encoded_row + column * COLUMN_STRIDE, mask=owned, other=0)
    return tl.where(owned, tl.maximum(encoded, 0) // DIVISOR, -1)


@triton.jit
def prepare_step_kernel(  # type: ignore[no-untyped-def]
    encoded_offsets,  # [pools, seqs, 2, max_blocks]
    accepted_tokens,  # [B, K+1]
    num_accepted,  # [B]
    ctx_len,  # [max_batch + 1]
    slots,  # [B]
    arrivals,  # [1] int32, zero before and after, if IN_PLACE; else anything
    block_tables,  # [rows, max_blocks] out
    block_counts,  # [rows] out
    bonus,  # [B] out
    query_positions,  # [B, block_size] out
    context_positions,  # [B, K+1] out
    embedding_ids,  # [B+1] out
    store_pages,  # [B, K+1] out
    store_offsets,  # [B, K+1] out
    new_ctx_len,  # [max_batch + 1] out; ctx_len itself if IN_PLACE
    advertised,  # [B] out
    pages,  # [B, block_size] out
    offsets,  # [B, block_size] out
    upper,  # [1, block_size, 1, block_size] out, bool
    seq_lens,  # [B] out
    POOL_OFFSET: tl.constexpr, SEQ_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, DIVISOR: tl.constexpr, BLOCK: tl.constexpr,
    NUM_CONTEXTS: tl.constexpr, NUM_GEN: tl.constexpr, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, DUMMY: tl.constexpr, CTX_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_CTX: tl.constexpr, MASK_TOKEN_ID: tl.constexpr,
    ADVANCE: tl.constexpr, IN_PLACE: tl.constexpr,
    LANES: tl.constexpr, REQUESTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (row): decode the row's table, then all of a gen request. The last program to arrive advances ctx_len."""
    row = tl.program_id(0)
    encoded_row = encoded_offsets + POOL_OFFSET + row.to(tl.int64) * SEQ_STRIDE
    count = tl.zeros([], tl.int32)
    for start in range(0, MAX_BLOCKS, BLOCK):
        table_column = start + tl.arange(0, BLOCK)
        encoded = tl.load(encoded_row + table_column * COLUMN_STRIDE, mask=table_column < MAX_BLOCKS, other=-1)
        decoded = tl.maximum(encoded, 0) // DIVISOR
        tl.store(block_tables + row.to(tl.int64) * MAX_BLOCKS + table_column, decoded, mask=table_column < MAX_BLOCKS)
        count += tl.sum((encoded >= 0).to(tl.int32))
    tl.store(block_counts + row, count)

    j = tl.arange(0, LANES)
    if row == 0:
        query, key = j[:, None], j[None, :]
        tl.store(upper + query * BLOCK_SIZE + key, key > query, mask=(query < BLOCK_SIZE) & (key < BLOCK_SIZE))
    if row >= NUM_CONTEXTS:
        b = row - NUM_CONTEXTS
        slot = safe_slots(tl.load(slots + b + tl.arange(0, 1)), DUMMY)
        old = tl.load(ctx_len + slot * CTX_STRIDE).to(tl.int32)
        c = tl.sum(old)  # of one
        n = clip(tl.load(num_accepted + b), 1, WIDTH)

        token = tl.load(accepted_tokens + b.to(tl.int64) * ROW_STRIDE + (n - 1) * TOKEN_STRIDE).to(tl.int32)
        tl.store(bonus + b, token)
        tl.store(embedding_ids + b, token)
        if b == NUM_GEN - 1:
            tl.store(embedding_ids + NUM_GEN, MASK_TOKEN_ID)
        block_start = tl.minimum(tl.minimum(c, MAX_CTX) + n, MAX_CTX)
        tl.store(query_positions + b * BLOCK_SIZE + j, block_start + j, mask=j < BLOCK_SIZE)
        tl.store(context_positions + b * WIDTH + j, c + j, mask=j < WIDTH)

        verified = j < WIDTH
        column = context_column(c, j, count, PAGE_SIZE)
        page = _decoded_page(encoded_row, column // PAGE_SIZE, verified & (count > 0), COLUMN_STRIDE, DIVISOR)
        place = tl.where(page < 0, -1, page.to(tl.int64) * PAGE_SIZE + column % PAGE_SIZE)
        page = tl.where(overwrites(place, j, place, j) == 1, -1, page)
        tl.store(store_pages + b * WIDTH + j, page, mask=verified)
        tl.store(store_offsets + b * WIDTH + j, column % PAGE_SIZE, mask=verified)

        new = advanced_length(old, slot, slots, num_accepted, NUM_GEN, DUMMY, MAX_CTX, REQUESTS) if ADVANCE else old
        length = advertised_length(tl.sum(new), count, PAGE_SIZE, BLOCK_SIZE, MAX_CTX)
        tl.store(advertised + b, length)
        tl.store(seq_lens + b, length + BLOCK_SIZE)
        drafted = j < BLOCK_SIZE
        block_column = (length + j) // PAGE_SIZE
        owned = drafted & (block_column < count) & (length + j >= 0)
        block_page = _decoded_page(encoded_row, block_column, owned, COLUMN_STRIDE, DIVISOR)
        tl.store(pages + b * BLOCK_SIZE + j, block_page, mask=drafted)
        tl.store(offsets + b * BLOCK_SIZE + j, floor_remainder(length + j, PAGE_SIZE), mask=drafted)

    if ADVANCE:
        advances = row == 0
        if IN_PLACE:
            # whoever arrives last knows that every program has read the old lengths
            tl.debug_barrier()
            advances = tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1
        if advances:
            for first_slot in range(0, DUMMY + 1, SLOTS):
                some = first_slot + tl.arange(0, SLOTS)
                before = tl.load(ctx_len + some * CTX_STRIDE, mask=some <= DUMMY, other=0)
                after = advanced_length(before, some, slots, num_accepted, NUM_GEN, DUMMY, MAX_CTX, REQUESTS)
                tl.debug_barrier()  # several threads may have loaded one element
                tl.store(new_ctx_len + some * CTX_STRIDE, after, mask=some <= DUMMY)
            if IN_PLACE:
                tl.store(arrivals, 0)


class _Static(NamedTuple):
    """The op's static arguments, in its order."""

    pool_idx: int
    divisor: int
    page_size: int
    block_size: int
    max_ctx: int
    mask_token_id: int
    num_contexts: int
    advance: bool


def _launch(encoded_offsets: Any, accepted_tokens: Any, ctx_len: Any, static: _Static, *, in_place: bool) -> Launch:
    max_blocks, num_slots = encoded_offsets.shape[3], ctx_len.shape[0]
    num_gen, width = accepted_tokens.shape
    pool_stride, seq_stride, _, column_stride = strides(encoded_offsets)
    row_stride, token_stride = strides(accepted_tokens)
    block = power_of_2(max_blocks, at_most=16384)
    constexprs = {
        "POOL_OFFSET": static.pool_idx * pool_stride,
        "SEQ_STRIDE": seq_stride,
        "COLUMN_STRIDE": column_stride,
        "MAX_BLOCKS": max_blocks,
        "DIVISOR": static.divisor,
        "BLOCK": block,
        "NUM_CONTEXTS": static.num_contexts,
        "NUM_GEN": num_gen,
        "WIDTH": width,
        "ROW_STRIDE": row_stride,
        "TOKEN_STRIDE": token_stride,
        "DUMMY": num_slots - 1,
        "CTX_STRIDE": strides(ctx_len)[0],
        "BLOCK_SIZE": static.block_size,
        "PAGE_SIZE": static.page_size,
        "MAX_CTX": static.max_ctx,
        "MASK_TOKEN_ID": static.mask_token_id,
        "ADVANCE": static.advance,
        "IN_PLACE": in_place,
        "LANES": power_of_2(max(width, static.block_size)),
        "REQUESTS": power_of_2(num_gen, at_most=32),
        "SLOTS": power_of_2(num_slots, at_most=256),
    }
    return Launch((static.num_contexts + num_gen,), constexprs, num_warps=max(4, min(block // 256, 16)))


def _output_shapes(
    encoded_offsets: Any, accepted_tokens: Any, ctx_len: Any, num_contexts: int, block_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the kernel's outputs, in its order."""
    num_gen, width = accepted_tokens.shape
    return {
        "block_tables": (num_contexts + num_gen, encoded_offsets.shape[3]),
        "block_counts": (num_contexts + num_gen,),
        "bonus": (num_gen,),
        "query_positions": (num_gen, block_size),
        "context_positions": (num_gen, width),
        "embedding_ids": (num_gen + 1,),
        "store_pages": (num_gen, width),
        "store_offsets": (num_gen, width),
        "ctx_len": tuple(ctx_len.shape),
        "advertised": (num_gen,),
        "pages": (num_gen, block_size),
        "offsets": (num_gen, block_size),
        "upper": (1, block_size, 1, block_size),
        "seq_lens": (num_gen,),
    }


def _gathered(out: dict[str, Any], num_contexts: int) -> PreparedStep:
    """The outputs by name as the op's result."""
    return PreparedStep(
        block_tables=out["block_tables"],
        block_counts=out["block_counts"],
        prologue=Prologue(*(out[name] for name in Prologue._fields)),
        store_pages=out["store_pages"],
        store_offsets=out["store_offsets"],
        ctx_len=out["ctx_len"],
        advertised=out["advertised"],
        placement=BlockPlacement(
            pages=out["pages"],
            offsets=out["offsets"],
            upper=out["upper"],
            page_tables=out["block_tables"][num_contexts:],
            seq_lens=out["seq_lens"],
        ),
    )


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
    """A step's bookkeeping, `ctx_len` advanced in place; see `jdspark.ops.prepare_step`.

    One launch, behind one that zeroes the counter of the programs which have read `ctx_len`; one more for the noise block.
    """
    import torch

    from .. import eager

    contracts.prepare_step(
        encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
        pool_idx, divisor, page_size, block_size, max_ctx, mask_token_id, num_contexts, embedding, mask_row,
    )  # fmt: skip
    static = _Static(pool_idx, divisor, page_size, block_size, max_ctx, mask_token_id, num_contexts, advance)
    if slots.shape[0] == 0:  # nothing to fuse
        return eager.prepare_step(
            encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
            **static._asdict(), embedding=embedding, mask_row=mask_row,
        )  # fmt: skip
    launch = _launch(encoded_offsets, accepted_tokens, ctx_len, static, in_place=True)
    shapes = _output_shapes(encoded_offsets, accepted_tokens, ctx_len, num_contexts, block_size)
    out = {
        name: ctx_len if name == "ctx_len" else ctx_len.new_empty(shape, dtype=torch.bool if name == "upper" else torch.int32)
        for name, shape in shapes.items()
    }
    arrivals = ctx_len.new_zeros(1, dtype=torch.int32) if advance else slots
    inputs = [encoded_offsets, accepted_tokens, num_accepted.contiguous(), ctx_len, slots.contiguous(), arrivals]
    launch_in_torch(prepare_step_kernel, [*inputs, *out.values()], launch)
    prepared = _gathered(out, num_contexts)
    if embedding is None:
        return prepared
    bonus = prepared.prologue.bonus
    return prepared._replace(
        noise=noise_block(embedding, bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    )


def prepare_step_in_jax(
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
    """See `jdspark.ops.prepare_step`; the new `ctx_len` is an array of its own, so no program waits for another."""
    inputs = [jnp.asarray(x) for x in (encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots)]
    static = _Static(pool_idx, divisor, page_size, block_size, max_ctx, mask_token_id, num_contexts, advance)
    if slots.shape[0] == 0:  # nothing to fuse
        return ops.prepare_step(
            encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots,
            **static._asdict(), embedding=embedding, mask_row=mask_row,
        )  # fmt: skip
    launch = _launch(encoded_offsets, accepted_tokens, ctx_len, static, in_place=False)
    shapes = _output_shapes(encoded_offsets, accepted_tokens, ctx_len, num_contexts, block_size)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.bool_ if name == "upper" else jnp.int32) for name, shape in shapes.items()]
    arrivals = inputs[4]  # not used
    out = dict(zip(shapes, launch_in_jax(prepare_step_kernel, [*inputs, arrivals], outputs, launch), strict=True))
    if not advance:
        out["ctx_len"] = inputs[3]
    prepared = _gathered(out, num_contexts)
    if embedding is None:
        return prepared
    bonus = prepared.prologue.bonus
    return prepared._replace(
        noise=noise_block_in_jax(embedding, bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    )
