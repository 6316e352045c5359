"""Every exact op once more, as loops over Python integers straight from the specification. Slow and obvious.

Floats are moved as bit patterns. Arguments and results are NumPy arrays, named as in `jdspark.ops`.
"""

from __future__ import annotations

import numpy as np


def bits(x):
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def clip(value, low, high):
    return max(low, min(int(value), high))


def slot_of(slots, b, ctx_len):
    slot, dummy = int(slots[b]), len(ctx_len) - 1
    return slot if 0 <= slot <= dummy else dummy


def pages_of(pool, layout):
    """The pool as `[pages, L, P, D]`, a view."""
    return pool.swapaxes(0, 1) if layout == "layer_major" else pool


def refresh_block_tables(encoded_offsets, *, pool_idx, num_seqs, divisor):
    columns = encoded_offsets.shape[3]
    tables, counts = np.zeros((num_seqs, columns), np.int32), np.zeros(num_seqs, np.int32)
    for row in range(num_seqs):
        for column in range(columns):
            e = int(encoded_offsets[pool_idx, row, 0, column])
            counts[row] += e >= 0
            tables[row, column] = max(e, 0) // divisor
    return tables, counts


def gen_prologue(accepted_tokens, num_accepted, ctx_len, slots, *, block_size, max_ctx, mask_token_id):
    B, width = accepted_tokens.shape
    bonus = np.zeros(B, np.int32)
    query, context = np.zeros((B, block_size), np.int64), np.zeros((B, width), np.int64)
    for b in range(B):
        n = clip(num_accepted[b], 1, width)
        c = int(ctx_len[slot_of(slots, b, ctx_len)])
        bonus[b] = accepted_tokens[b, n - 1]
        query[b] = [min(c + n, max_ctx) + j for j in range(block_size)]
        context[b] = [c + j for j in range(width)]
    return bonus, query, context, np.append(bonus, np.int32(mask_token_id))


def noise_block(embedding, bonus, *, block_size, mask_token_id, mask_row=None):
    block = np.zeros((len(bonus), block_size, embedding.shape[1]), embedding.dtype)
    mask = embedding[mask_token_id] if mask_row is None else mask_row.reshape(-1).astype(embedding.dtype)
    for b, token in enumerate(bonus):
        bits(block)[b, 0] = bits(embedding)[clip(token, 0, len(embedding) - 1)]
        bits(block)[b, 1:] = bits(mask)
    return (block,)


def store_gen_context(
    pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, *, layout="layer_major", first_row=0
):
    pool = pool.copy()
    pages = pages_of(pool, layout)
    num_pages, _, P, _ = pages.shape
    B, max_blocks = len(slots), block_tables.shape[1]
    width = len(latents) // B
    for b in range(B):
        row = first_row + b
        count = clip(block_counts[row], 0, max_blocks)
        n, c = clip(num_accepted[b], 1, width), int(ctx_len[slot_of(slots, b, ctx_len)])
        for j in range(width):
            q = max(min(c + j, count * P - 1), 0)
            page = int(block_tables[row, q // P])
            if count == 0 or not 0 <= page < num_pages:
                continue
            x = latents[b * width + j]
            if j >= n:
                with np.errstate(invalid="ignore"):
                    x = (x.astype(np.float32) * np.float32(0)).astype(x.dtype)
            bits(pages)[page, :, q % P] = bits(x)
    return (pool,)


def advance_ctx_len(ctx_len, slots, num_accepted, block_counts, *, page_size, block_size, max_ctx, first_row=0):
    lengths = [int(c) for c in ctx_len]
    B = len(slots)
    for b in range(B):
        lengths[slot_of(slots, b, ctx_len)] += max(int(num_accepted[b]), 1)
    lengths = [min(length, max_ctx) for length in lengths]
    lengths[-1] = 0
    room = [max(int(block_counts[first_row + b]) * page_size - block_size, 0) for b in range(B)]
    advertised = [min(lengths[slot_of(slots, b, ctx_len)], room[b]) for b in range(B)]
    return np.array(lengths, np.int32), np.array(advertised, np.int32)


def scatter_context(pool, latents, rows, positions, block_tables, *, layout="layer_major"):
    pool = pool.copy()
    pages = pages_of(pool, layout)
    num_rows, max_blocks = block_tables.shape
    for x, row, position in zip(latents, rows, positions):
        column = int(position) // pages.shape[2]
        if not (0 <= row < num_rows and 0 <= column < max_blocks):
            continue
        page = int(block_tables[row, column])
        if 0 <= page < len(pages):
            bits(pages)[page, :, int(position) % pages.shape[2]] = bits(x)
    return (pool,)


def block_placement(advertised, block_tables, *, block_size, page_size, first_row=0, block_counts=None):
    B, max_blocks = len(advertised), block_tables.shape[1]
    pages, offsets = np.zeros((B, block_size), np.int64), np.zeros((B, block_size), np.int64)
    for b in range(B):
        row = first_row + b
        count = max_blocks if block_counts is None else clip(block_counts[row], 0, max_blocks)
        for j in range(block_size):
            position = int(advertised[b]) + j
            column = position // page_size
            pages[b, j] = block_tables[row, column] if 0 <= column < count else -1
            offsets[b, j] = position % page_size
    upper = np.array([[[[k > q for k in range(block_size)]] for q in range(block_size)]])
    return pages, offsets, upper, block_tables[first_row : first_row + B], advertised.astype(np.int64) + block_size


def write_block_latents(pool, block_latents, placement, *, layout="layer_major", layer=None):
    pool = pool.copy()
    pages = pages_of(pool, layout)
    B, block_size = placement.pages.shape
    for b in range(B):
        for j in range(block_size):
            page, offset = int(placement.pages[b, j]), int(placement.offsets[b, j])
            if not (0 <= page < len(pages) and 0 <= offset < pages.shape[2]):
                continue
            if layer is None:
                bits(pages)[page, :, offset] = bits(block_latents)[:, b, j]
            else:
                bits(pages)[page, layer, offset] = bits(block_latents)[b, j]
    return (pool,)


def prepare_step(
    encoded_offsets, accepted_tokens, num_accepted, ctx_len, slots, *, pool_idx, divisor, page_size, block_size, max_ctx,
    mask_token_id, num_contexts=0, advance=True, embedding=None, mask_row=None,
):  # fmt: skip
    B, width = accepted_tokens.shape
    room = {"page_size": page_size, "block_size": block_size}
    tables, counts = refresh_block_tables(encoded_offsets, pool_idx=pool_idx, num_seqs=num_contexts + B, divisor=divisor)
    prologue = gen_prologue(
        accepted_tokens, num_accepted, ctx_len, slots, block_size=block_size, max_ctx=max_ctx, mask_token_id=mask_token_id
    )
    pages, offsets = np.zeros((B, width), np.int64), np.zeros((B, width), np.int64)
    for b in range(B):
        row, count = num_contexts + b, int(counts[num_contexts + b])
        c = int(ctx_len[slot_of(slots, b, ctx_len)])
        taken = {}
        for j in range(width):
            q = max(min(c + j, count * page_size - 1), 0)
            pages[b, j], offsets[b, j] = tables[row, q // page_size] if count else -1, q % page_size
            loser = taken.get((pages[b, j], offsets[b, j]))
            if loser is not None:
                pages[b, loser] = -1
            taken[pages[b, j], offsets[b, j]] = j
    if advance:
        ctx_len, advertised = advance_ctx_len(
            ctx_len, slots, num_accepted, counts, **room, max_ctx=max_ctx, first_row=num_contexts
        )
    else:
        advertised = np.array([
            min(int(ctx_len[slot_of(slots, b, ctx_len)]), max(int(counts[num_contexts + b]) * page_size - block_size, 0))
            for b in range(B)
        ])  # fmt: skip
    placement = block_placement(advertised, tables, **room, first_row=num_contexts, block_counts=counts)
    noise = (
        ()
        if embedding is None
        else noise_block(embedding, prologue[0], block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row)
    )
    return tables, counts, *prologue, pages, offsets, ctx_len, advertised, *placement, *noise


def store_prepared(pool, latents, num_accepted, store_pages, store_offsets, *, layout="layer_major"):
    pool = pool.copy()
    pages = pages_of(pool, layout)
    B, width = store_pages.shape
    for b in range(B):
        for j in range(width):
            page, offset = int(store_pages[b, j]), int(store_offsets[b, j])
            if 0 <= page < len(pages) and 0 <= offset < pages.shape[2]:
                x = latents[b * width + j]
                if j >= clip(num_accepted[b], 1, width):
                    with np.errstate(invalid="ignore"):
                        x = (x.astype(np.float32) * np.float32(0)).astype(x.dtype)
                bits(pages)[page, :, offset] = bits(x)
    return (pool,)


def argmax(row):
    best = 0
    for i, x in enumerate(row):
        if np.isnan(x):
            return i
        if x > row[best]:
            best = i
    return best


def accept_strict(logits, draft_tokens, *, num_contexts=0, force=0.0, force_counter=0):
    B, K = draft_tokens.shape
    accepted = np.zeros((num_contexts + B, K + 1), np.int32)
    n = np.ones(num_contexts + B, np.int32)
    for row in range(num_contexts):
        accepted[row, 0] = argmax(logits[row])
    for b in range(B):
        first = num_contexts + b * (K + 1)
        tokens = [argmax(logits[first + j]) for j in range(K + 1)]
        accepted[num_contexts + b] = tokens
        while n[num_contexts + b] <= K and draft_tokens[b, n[num_contexts + b] - 1] == tokens[n[num_contexts + b] - 1]:
            n[num_contexts + b] += 1
    if force > 0:
        from jdspark.ops.accept_strict import force_pool

        total, fraction = min(int(force) + 1, K + 1), force - int(force)
        n[num_contexts:] = total
        if fraction and total < K + 1:
            counter = force_counter + 1
            for b in range(B):
                n[num_contexts + b] += bool(force_pool()[(counter * 1000003 + b * 7919) % 4096] < np.float32(fraction))
    return accepted, n


def next_tokens(accepted_tokens, num_accepted, draft_tokens):
    rows, width = accepted_tokens.shape
    tokens = np.zeros((rows, width), np.int32)
    for row in range(rows):
        tokens[row, 0] = accepted_tokens[row, clip(num_accepted[row], 1, width) - 1]
        gen_row = row - (rows - len(draft_tokens))
        if gen_row >= 0:
            tokens[row, 1:] = draft_tokens[gen_row]
    return (tokens,)


def markov_chain(base_logits, anchor, w1, w2):
    """For small integer operands, where every sum is exact in any order and dtype."""
    corrected = base_logits.astype(np.float32).copy()
    B, K, _ = corrected.shape
    tokens = np.zeros((B, K), np.int32)
    for b in range(B):
        previous = anchor[b]
        for i in range(K):
            embedded = w1[clip(previous, 0, len(w1) - 1)].astype(np.float32)
            corrected[b, i] += (w2.astype(np.float32) @ embedded).astype(w1.dtype).astype(np.float32)
            tokens[b, i] = previous = argmax(corrected[b, i])
    return corrected, tokens


def integers(x):
    return x.astype(np.float32).astype(np.int64)


def linear(x, weight, residual=None):
    """For small integer operands: sums of Python integers, then one rounding, and a second one with a residual."""
    product = (integers(x) @ integers(weight).T).astype(np.float32).astype(weight.dtype)
    if residual is not None:
        product = (residual.astype(np.float32) + product.astype(np.float32)).astype(weight.dtype)
    return (product,)


def head_product(x, weight, *, transposed):
    """For small integer operands."""
    products = np.zeros((*x.shape[:3], weight.shape[1 if transposed else 2]), x.dtype)
    for h in range(x.shape[2]):
        of_head = integers(weight[h])
        products[:, :, h] = (integers(x[:, :, h]) @ (of_head.T if transposed else of_head)).astype(np.float32).astype(x.dtype)
    return (products,)
