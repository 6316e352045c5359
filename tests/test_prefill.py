"""Storing a prompt's context: chunks, buckets, refusals, and the agreement of the two halves of one attention."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import init_state, store_prefill_context
from jdspark.drafter import linear, project_context
from jdspark.ops import norm_rope
from jdspark.prefill import token_bucket
from jdspark.presets import TINY, random_drafter
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget, stored_latents


@pytest.fixture
def target(geometry):
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    for slot in range(3):
        target.grow(slot, 36)
    return target


@pytest.fixture
def state(geometry):
    state = init_state(TINY, geometry, dtype=jnp.float32)
    return dataclasses.replace(state, pool=state.pool + np.float32(0.5))


def part(chunk, tokens):
    return {name: array[tokens] if name in ("captured", "positions", "rows") else array for name, array in chunk.items()}


def fresh(state):
    return jax.tree.map(jnp.copy, state)


def test_buckets():
    assert [token_bucket(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_one_compilation_per_bucket(params, geometry, target, compilations):
    other = dataclasses.replace(geometry, num_pages=47)  # a geometry of its own: nothing is compiled for it yet
    state = init_state(TINY, other, dtype=jnp.float32)
    store_prefill_context(params, state, **target.prompt(0, 0, 3))  # what else is compiled once
    state = init_state(TINY, dataclasses.replace(geometry, num_pages=46), dtype=jnp.float32)
    compilations.clear()
    for length in (1, 7, 16, 17, 20, 32):
        state = store_prefill_context(params, state, **target.prompt(0, 0, length))
        assert np.asarray(state.ctx_len)[0] == length
    assert len(compilations) == 2


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
def test_latents_lie_where_the_pages_say(params, geometry, target, layout):
    geometry = dataclasses.replace(geometry, layout=layout)
    state = dataclasses.replace(init_state(TINY, geometry, dtype=jnp.float32))
    state = dataclasses.replace(state, pool=state.pool + np.float32(0.5))
    before = np.asarray(state.pool).copy()
    chunk = target.prompt(1, 0, 21)
    positions = jnp.asarray(chunk["positions"])
    padded = jnp.pad(jnp.asarray(chunk["captured"]), ((0, 11), (0, 0)))
    wanted = project_context(params, TINY, padded, jnp.pad(positions, (0, 11)), state.rope_cos, state.rope_sin)[:21]
    state = store_prefill_context(params, state, **chunk)
    stored = stored_latents(state, chunk["encoded_offsets"], chunk["positions"])
    np.testing.assert_allclose(stored, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())  # jitted or not: other fusions
    axes = (0, 3) if layout == "layer_major" else (1, 3)
    assert (np.asarray(state.pool) != before).any(axis=axes).sum() == 21


def test_chunked_prefill_equals_whole_prefill(params, state, target):
    chunk = target.prompt(0, 0, 32)
    whole = store_prefill_context(params, fresh(state), **chunk)
    chunked = store_prefill_context(params, state, **part(chunk, slice(0, 16)))
    assert chunked.ctx_len[0] == 16
    chunked = store_prefill_context(params, chunked, **part(chunk, slice(16, 32)))
    assert compare(chunked.ctx_len, whole.ctx_len)
    difference = np.abs(np.asarray(chunked.pool) - np.asarray(whole.pool)).max()
    assert difference <= 1e-6 * np.abs(np.asarray(whole.pool)).max()  # GEMMs of 16 and 32 rows
    untouched = np.asarray(whole.pool) == 0.5
    assert np.array_equal(np.asarray(chunked.pool) == 0.5, untouched)


def test_several_rows_interleaved(params, state, target):
    a, b = target.prompt(0, 0, 8), target.prompt(1, 0, 8)
    alone = store_prefill_context(params, store_prefill_context(params, fresh(state), **a), **b)
    order = np.random.default_rng(0).permutation(16)
    both = {
        "captured": np.concatenate([a["captured"], b["captured"]])[order],
        "positions": np.tile(a["positions"], 2)[order],
        "rows": np.repeat(np.array([0, 1], np.int32), 8)[order],
        "slots": np.array([0, 1], np.int32),
        "encoded_offsets": target.encoded_offsets([0, 1]),
    }
    together = store_prefill_context(params, state, **both)
    assert compare(together.ctx_len, alone.ctx_len)
    assert compare(together.pool, alone.pool)  # the same bucket, so the same GEMM shape


def test_first_position_zero_resets_a_reused_slot(params, state, target):
    state = store_prefill_context(params, state, **target.prompt(0, 0, 20))
    state = store_prefill_context(params, state, **target.prompt(0, 0, 3))
    assert state.ctx_len.tolist() == [3, 0, 0, 0, 0]


def test_a_row_that_does_not_fit_is_refused_alone(params, state, target):
    """36 = max_ctx; the row of 37 tokens stores nothing and its slot is emptied, the other is stored as if alone."""
    state = store_prefill_context(params, state, **target.prompt(0, 0, 20))
    before = np.asarray(state.pool).copy()
    long, other = target.prompt(0, 20, 17), target.prompt(1, 0, 5)
    both = {name: np.concatenate([long[name], other[name]]) for name in ("captured", "positions")}
    both |= {
        "rows": np.repeat(np.array([0, 1], np.int32), [17, 5]),
        "slots": np.array([0, 1], np.int32),
        "encoded_offsets": target.encoded_offsets([0, 1]),
    }
    state = store_prefill_context(params, state, **both)
    assert state.ctx_len.tolist() == [0, 5, 0, 0, 0]
    pages = set(np.flatnonzero((np.asarray(state.pool) != before).any(axis=(0, 2, 3))).tolist())
    assert pages == set((both["encoded_offsets"][0, 1, 0, :2] // 2).tolist())


@pytest.mark.parametrize("slot", [4, 99, -1])
def test_a_row_without_a_slot_stores_nothing(params, state, target, slot):
    before = fresh(state)
    chunk = target.prompt(0, 0, 5) | {"slots": np.array([slot], np.int32)}
    state = store_prefill_context(params, state, **chunk)
    assert compare(state.pool, before.pool)
    assert compare(state.ctx_len, before.ctx_len)


def test_a_row_with_too_few_pages_is_refused(params, state, target):
    chunk = target.prompt(0, 0, 9)
    chunk["encoded_offsets"][0, 0, 0, 2:] = -1  # two pages hold 8
    before = fresh(state)
    state = store_prefill_context(params, state, **chunk)
    assert compare(state.pool, before.pool)
    assert state.ctx_len[0] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_halves_of_the_attention_agree_bit_for_bit(dtype):
    """The context's latents (all layers at once) and the block's (one layer), from equal GEMM rows."""
    params = random_drafter(TINY, 0, dtype=dtype)
    rng = np.random.default_rng(0)
    length, half = 64, TINY.qk_rope_head_dim // 2
    angles = rng.uniform(0, 6, (length, half))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    raw = jnp.asarray(rng.standard_normal((21, 2, TINY.latent_dim)), dtype)
    positions = jnp.asarray(rng.integers(0, length, 21), jnp.int32)
    run = jax.jit(lambda x, p, w: norm_rope(x, p, w, cos, sin, eps=1e-5))
    context = run(raw, positions, params.kv_a_layernorm)
    for layer in range(2):
        block = run(raw[:, layer : layer + 1], positions, params.kv_a_layernorm[layer : layer + 1])
        assert compare(block[:, 0], context[:, layer])


def test_linear_rounds_to_the_weights_dtype():
    """The result a GEMM in bf16 has to have, whatever it is fused with: the fp32 product rounded once."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-8, 9, (3, 64)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-8, 9, (40, 64)), jnp.bfloat16)  # sums are exact in fp32, not in bf16
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    fused = jax.jit(lambda x, w: linear(x, w).astype(jnp.float32) + 1)(x, w)
    assert np.array_equal(fused, exact.astype(np.float32).astype(jnp.bfloat16).astype(np.float32) + 1)
    assert not np.array_equal(fused, exact + 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"captured": np.zeros((5, 3), np.float32)}, ValueError, "captured has shape [5, 3], expected [N, T*H_t=32]"),
        ({"captured": np.zeros((0, 32), np.float32)}, ValueError, "captured has no rows"),
        ({"positions": np.zeros(4, np.int32)}, ValueError, "positions has shape [4], expected [N=5]"),
        ({"positions": np.arange(-1, 4, dtype=np.int32)}, ValueError, "positions holds -1"),
        ({"rows": np.zeros(5, np.int64)}, TypeError, "rows has dtype int64, expected int32"),
        ({"rows": np.full(5, 1, np.int32)}, ValueError, "rows names row 1, but slots has 1 rows"),
        ({"slots": np.zeros(0, np.int32)}, ValueError, "slots is empty"),
        ({"slots": np.zeros(3, np.int32)}, ValueError, "encoded_offsets has 1 rows, the batch has 3"),
        ({"encoded_offsets": np.zeros((0, 1, 2, 12), np.int32)}, ValueError, "has 0 pools, the geometry's pool_idx is 0"),
        ({"encoded_offsets": np.zeros((1, 1, 2, 9), np.int32)}, ValueError, "max_blocks_per_seq=12"),
    ],
)
def test_bad_chunks_are_refused_before_dispatch(params, state, target, change, error, message):
    before = fresh(state)
    with pytest.raises(error, match=re.escape(message)):
        store_prefill_context(params, state, **(target.prompt(0, 0, 5) | change))
    assert compare(state.pool, before.pool)


def test_a_drafter_without_a_context_projection_is_refused(params, state, target):
    with pytest.raises(ValueError, match="no fc / hidden_norm"):
        store_prefill_context(dataclasses.replace(params, fc=None), state, **target.prompt(0, 0, 5))
