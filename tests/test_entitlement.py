"""No op ever writes outside the places it is entitled to, whatever the device values are.

Every request owns the pages of its own row, up to its count; hypothesis draws slots, counts, lengths, tokens and page
numbers from all of int32.
"""

import dataclasses
import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jdspark import Geometry, StepInputs, init_state, make_decode_step, ops, store_prefill_context
from jdspark.presets import TINY, random_drafter
from torch_bridge import bitwise_equal, eager

INT32 = st.one_of(st.integers(-3, 40), st.integers(-(2**31), 2**31 - 1), st.sampled_from([-(2**31), 2**31 - 1, 2**30, -1]))
L, PAGES, P, D, B, K, COLUMNS = 2, 24, 4, 3, 3, 3, 6
ROWS = B + 1  # one context row first

quick = settings(max_examples=60, deadline=None)


def ints(*shape, of=INT32):
    return hnp.arrays(np.int32, shape, elements=of)


def tables():
    """Rows with disjoint pages, so that a write can be traced to its owner."""
    return st.permutations(range(PAGES)).map(lambda p: np.array(p[: ROWS * COLUMNS], np.int32).reshape(ROWS, COLUMNS))


@functools.cache
def jitted(op, **static):
    return jax.jit(functools.partial(getattr(ops, op), **static))


def fresh_pool(layout):
    outer = (L, PAGES) if layout == "layer_major" else (PAGES, L)
    return np.full((*outer, P, D), 0.5, np.float32)


def written_pages(before, after, layout):
    axes = (0, 2, 3) if layout == "layer_major" else (1, 2, 3)
    return set(np.flatnonzero((np.asarray(after) != before).any(axis=axes)).tolist())


def owned(block_tables, block_counts, rows):
    return {int(p) for r in rows for p in block_tables[r, : min(max(int(block_counts[r]), 0), COLUMNS)]}


LAYOUTS = pytest.mark.parametrize("layout", ["layer_major", "page_major"])


@LAYOUTS
@quick
@given(ints(5), ints(B), ints(B), tables(), ints(ROWS))
def test_store_gen_context(layout, ctx_len, slots, num_accepted, block_tables, block_counts):
    pool = fresh_pool(layout)
    latents = np.arange(1, B * (K + 1) * L * D + 1, dtype=np.float32).reshape(-1, L, D)
    operands = (latents, ctx_len, slots, num_accepted, block_tables, block_counts)
    after = jitted("store_gen_context", layout=layout, first_row=1)(pool, *operands)
    assert written_pages(pool, after, layout) <= owned(block_tables, block_counts, range(1, ROWS))
    twin = eager.store_gen_context(
        torch.from_numpy(pool.copy()), *(torch.from_numpy(x) for x in operands), layout=layout, first_row=1
    )
    assert bitwise_equal(twin, after)


@LAYOUTS
@quick
@given(ints(5), ints(B), ints(B), ints(ROWS, COLUMNS), ints(ROWS))
def test_store_with_any_page_numbers_agrees_with_torch(layout, ctx_len, slots, num_accepted, block_tables, block_counts):
    pool = fresh_pool(layout)
    latents = np.arange(1, B * (K + 1) * L * D + 1, dtype=np.float32).reshape(-1, L, D)
    operands = (latents, ctx_len, slots, num_accepted, block_tables, block_counts)
    after = jitted("store_gen_context", layout=layout, first_row=1)(pool, *operands)
    named = {int(p) for p in block_tables[1:].reshape(-1) if 0 <= p < PAGES}
    assert written_pages(pool, after, layout) <= named
    twin = eager.store_gen_context(
        torch.from_numpy(pool.copy()), *(torch.from_numpy(x) for x in operands), layout=layout, first_row=1
    )
    assert bitwise_equal(twin, after)


@LAYOUTS
@quick
@given(ints(9), ints(9), tables())
def test_scatter_context(layout, rows, positions, block_tables):
    pool = fresh_pool(layout)
    latents = np.arange(1, 9 * L * D + 1, dtype=np.float32).reshape(9, L, D)
    after = jitted("scatter_context", layout=layout)(pool, latents, rows, positions, block_tables)
    valid = [(r, p) for r, p in zip(rows, positions) if 0 <= r < ROWS and 0 <= p < COLUMNS * P]
    assert written_pages(pool, after, layout) == {int(block_tables[r, p // P]) for r, p in valid}
    twin = eager.scatter_context(
        torch.from_numpy(pool.copy()), *(torch.from_numpy(x) for x in (latents, rows, positions, block_tables)), layout=layout
    )
    assert bitwise_equal(twin, after)


@LAYOUTS
@quick
@given(ints(B), tables(), ints(ROWS))
def test_block_placement_and_write(layout, advertised, block_tables, block_counts):
    pool = fresh_pool(layout)
    static = {"block_size": K, "page_size": P, "first_row": 1}
    placement = jitted("block_placement", **static)(advertised, block_tables, block_counts=block_counts)
    block = np.arange(1, L * B * K * D + 1, dtype=np.float32).reshape(L, B, K, D)
    after = jitted("write_block_latents", layout=layout)(pool, block, placement)
    assert written_pages(pool, after, layout) <= owned(block_tables, block_counts, range(1, ROWS))
    for b in range(B):
        own = owned(block_tables, block_counts, [1 + b])
        assert set(np.asarray(placement.pages)[b].tolist()) <= own | {-1}


@quick
@given(ints(5), ints(B), ints(B), ints(ROWS))
def test_advance_ctx_len(ctx_len, slots, num_accepted, block_counts):
    static = {"page_size": P, "block_size": K, "max_ctx": 20, "first_row": 1}
    lengths, advertised = (
        np.asarray(x) for x in jitted("advance_ctx_len", **static)(ctx_len, slots, num_accepted, block_counts)
    )
    named = {int(s) for s in slots if 0 <= s < 5}
    for slot in range(4):
        if slot not in named:
            assert lengths[slot] == min(int(ctx_len[slot]), 20)
        assert lengths[slot] <= 20
    assert lengths[4] == 0
    room = np.maximum(block_counts[1:].astype(np.int64) * P - K, 0)
    assert (advertised <= room).all()
    twin = eager.advance_ctx_len(*(torch.from_numpy(x.copy()) for x in (ctx_len, slots, num_accepted, block_counts)), **static)
    assert bitwise_equal(twin, (lengths, advertised))


@quick
@given(ints(B, K + 1), ints(B), ints(5, of=st.integers(0, 2**31 - 64)), ints(B))
def test_gen_prologue_reads_inside_and_agrees_with_torch(accepted_tokens, num_accepted, ctx_len, slots):
    static = {"block_size": K, "max_ctx": 20, "mask_token_id": 7}
    ours = jitted("gen_prologue", **static)(accepted_tokens, num_accepted, ctx_len, slots)
    theirs = eager.gen_prologue(*(torch.from_numpy(x) for x in (accepted_tokens, num_accepted, ctx_len, slots)), **static)
    assert bitwise_equal(tuple(ours), tuple(theirs))
    for b in range(B):
        assert np.asarray(ours.bonus)[b] in accepted_tokens[b]


@quick
@given(ints(B), ints(B, K + 1), ints(B), ints(B, K))
def test_token_ids_are_clipped(bonus, accepted_tokens, num_accepted, draft_tokens):
    embedding = np.arange(40, dtype=np.float32).reshape(10, 4)
    block = jitted("noise_block", block_size=2, mask_token_id=9)(embedding, bonus)
    assert np.array_equal(block[:, 0], embedding[np.clip(bonus, 0, 9)])
    ones = np.ones((10, 1), np.float32)
    _, tokens = jitted("markov_chain")(np.zeros((B, 2, 10), np.float32), bonus, ones, ones)
    assert (np.asarray(tokens) == 0).all()
    upcoming = np.asarray(jitted("next_tokens")(accepted_tokens, num_accepted, draft_tokens))
    assert np.array_equal(upcoming[:, 0], accepted_tokens[np.arange(B), np.clip(num_accepted, 1, K + 1) - 1])


@functools.cache
def tiny_step():
    params = random_drafter(TINY, 0, dtype="float32")
    geometry = Geometry(max_batch=4, max_draft_len=K, page_size=P, num_pages=PAGES, max_blocks_per_seq=COLUMNS, max_ctx=20)
    return params, geometry, make_decode_step(TINY, geometry)


@settings(max_examples=40, deadline=None)
@given(
    ctx_len=ints(5),
    slots=ints(B),
    drafts=ints(B, K),
    block_tables=tables(),
    counts=hnp.arrays(np.int32, ROWS, elements=st.integers(0, COLUMNS)),
    seed=st.integers(0, 99),
)
def test_the_whole_step_writes_only_the_gen_rows_pages(ctx_len, slots, drafts, block_tables, counts, seed):
    params, geometry, step = tiny_step()
    rng = np.random.default_rng(seed)
    offsets = np.full((1, ROWS, 2, COLUMNS), -1, np.int32)
    for row, count in enumerate(counts):
        offsets[0, row, 0, :count] = block_tables[row, :count]
    state = init_state(TINY, geometry, dtype=jnp.float32)
    state = dataclasses.replace(state, pool=state.pool + 0.5, ctx_len=jnp.asarray(ctx_len))
    before = np.asarray(state.pool).copy()
    inputs = StepInputs(
        logits=rng.standard_normal((1 + B * (K + 1), TINY.vocab_size), np.float32),
        draft_tokens=drafts,
        captured=rng.standard_normal((B * (K + 1), TINY.captured_size), np.float32),
        encoded_offsets=offsets,
        slots=slots,
        num_contexts=1,
    )
    outputs, state = step(params, state, inputs)
    assert written_pages(before, state.pool, "layer_major") <= owned(block_tables, counts, range(1, ROWS))
    lengths = np.asarray(state.ctx_len)
    assert (lengths <= geometry.max_ctx).all()
    assert lengths[-1] == 0
    assert ((np.asarray(outputs.num_accepted) >= 1) & (np.asarray(outputs.num_accepted) <= K + 1)).all()
    assert ((np.asarray(outputs.draft_tokens) >= 0) & (np.asarray(outputs.draft_tokens) < TINY.vocab_size)).all()
    assert np.isfinite(np.asarray(state.pool)).all()


@settings(max_examples=40, deadline=None)
@given(
    slots=ints(2),
    rows=ints(9),
    positions=ints(9),
    block_tables=tables(),
    counts=hnp.arrays(np.int32, 2, elements=st.integers(0, COLUMNS)),
)
def test_prefill_writes_only_its_rows_pages(slots, rows, positions, block_tables, counts):
    params, geometry, _ = tiny_step()
    offsets = np.full((1, 2, 2, COLUMNS), -1, np.int32)
    for row, count in enumerate(counts):
        offsets[0, row, 0, :count] = block_tables[row, :count]
    state = init_state(TINY, geometry, dtype=jnp.float32)
    state = dataclasses.replace(state, pool=state.pool + 0.5)
    before = np.asarray(state.pool).copy()
    captured = np.random.default_rng(0).standard_normal((9, TINY.captured_size), np.float32)
    state = store_prefill_context(
        params, state, captured=captured, positions=jnp.asarray(positions), rows=jnp.asarray(rows), slots=slots,
        encoded_offsets=offsets,
    )  # fmt: skip
    assert written_pages(before, state.pool, "layer_major") <= owned(block_tables, counts, range(2))
    lengths = np.asarray(state.ctx_len)
    assert ((lengths >= 0) & (lengths <= geometry.max_ctx)).all()
    assert lengths[-1] == 0
