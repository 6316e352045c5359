"""The jitted decode step: one compilation, donated state, no pool copy, its special batches and its refusals."""

import dataclasses
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import (
    BackendUnavailable,
    Geometry,
    StepInputs,
    StepOptions,
    init_state,
    make_decode_step,
    store_prefill_context,
)
from jdspark.bench.bookkeeping import copies_of
from jdspark.presets import TINY, random_drafter
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget

from .hlo_graph import HOST_OP


@pytest.fixture
def target(geometry):
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    for slot in range(4):
        target.grow(slot, 36 + 8)
    return target


@pytest.fixture
def state(geometry, params, target):
    """Two requests of 9 and 5 context tokens in a pool that starts nonzero."""
    state = init_state(TINY, geometry, dtype=jnp.float32)
    state = dataclasses.replace(state, pool=state.pool + np.float32(0.5))
    for slot, length in ((0, 9), (1, 5)):
        state = store_prefill_context(params, state, **target.prompt(slot, 0, length))
    return state


def batch(target, slots=(0, 1), K=7, contexts=(), seed=1):
    drafts = np.random.default_rng(seed).integers(0, TINY.vocab_size, (len(slots), K)).astype(np.int32)
    return target.step_inputs(drafts, list(slots), contexts)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def test_one_compilation_over_changing_batches(params, geometry, target, state, compilations):
    step = make_decode_step(TINY, geometry)
    drafts = np.zeros((3, 7), np.int32)
    accepted = set()
    compilations.clear()
    for number in range(20):
        slots = [[0, 1, geometry.dummy_slot], [1, 0, 2], [geometry.dummy_slot] * 3][number % 3]
        outputs, state = step(params, state, target.step_inputs(drafts, slots))
        drafts = np.asarray(outputs.draft_tokens)
        accepted |= set(np.asarray(outputs.num_accepted).tolist())
    assert step.compilations == 1
    assert len(compilations) == 1
    assert accepted == set(range(1, 9))


@pytest.mark.parametrize("committed", [False, True])
def test_one_compilation_whatever_the_arrays_are_committed_to(params, geometry, target, state, compilations, committed):
    """Weights and inputs on the host, on the default device or put on a device; first state and carried state."""
    if committed:
        params = jax.device_put(params, jax.devices()[0])
    step = make_decode_step(TINY, geometry)
    places = (lambda x: x, jnp.asarray, lambda x: jax.device_put(x, jax.devices()[0]))
    batches = [jax.tree.map(place, batch(target)) for place in places]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    compilations.clear()
    step.lower(params, abstract, batch(target)).compile()
    for inputs in batches:
        _, state = step(params, state, inputs)
    assert len(compilations) == 1


def test_states_may_share_their_rope_tables(params, geometry, target, state):
    other = dataclasses.replace(state, pool=jnp.copy(state.pool), ctx_len=jnp.copy(state.ctx_len), force_counter=jnp.int32(0))
    step = make_decode_step(TINY, geometry)
    inputs = batch(target)
    first, _ = step(params, state, inputs)
    second, _ = step(params, other, inputs)
    assert compare(first.draft_tokens, second.draft_tokens)


def test_warm_up_compiles_and_touches_nothing(params, geometry, target, state):
    step = make_decode_step(TINY, geometry)
    inputs = batch(target)
    before = copied(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    step.lower(params, abstract, inputs).compile()
    step.lower(params, state, inputs).compile()
    assert not state.pool.is_deleted()
    assert compare(state.pool, before.pool)
    step(params, state, inputs)
    assert step.compilations == 1


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pool_is_never_copied(geometry, target, layout, dtype):
    """The donated pool is aliased to the result, and scratch memory does not grow with it."""
    params = random_drafter(TINY, 0, dtype=dtype)
    scratch = {}
    for num_pages in (48, 4800):
        large = dataclasses.replace(geometry, num_pages=num_pages, layout=layout)
        abstract = jax.eval_shape(lambda large=large: init_state(TINY, large, dtype=dtype))
        compiled = make_decode_step(TINY, large).lower(params, abstract, batch(target)).compile()
        memory = compiled.memory_analysis()
        pool_bytes = int(np.prod(abstract.pool.shape)) * abstract.pool.dtype.itemsize
        assert memory.alias_size_in_bytes >= pool_bytes
        scratch[num_pages] = memory.temp_size_in_bytes
        assert not copies_of(abstract.pool, compiled.as_text())
    assert scratch[48] == scratch[4800]


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_has_no_part_in_a_step(params, geometry, target, state, fused):
    """Nothing in the executable waits for the host, and a call moves nothing to or from it behind JAX's back."""
    options = StepOptions(fused_prologue=fused, return_draft_logits=True)
    step, inputs = make_decode_step(TINY, geometry, options), jax.device_put(batch(target))
    executable = step.lower(params, state, inputs).compile().as_text()
    assert "fusion" in executable
    assert not HOST_OP.findall(executable)
    step(params, copied(state), inputs)
    with jax.transfer_guard("disallow"):
        step(params, state, inputs)


def test_what_waits_for_the_host_is_found():
    shown = jax.ShapeDtypeStruct((3,), jnp.float32)
    asks = jax.jit(lambda x: jax.pure_callback(np.sin, shown, x)).lower(shown).compile()
    assert HOST_OP.findall(asks.as_text())


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
def test_prefill_does_not_copy_the_pool(params, geometry, target, layout):
    from jdspark.prefill import jitted_store
    from jdspark.state import device_of, split

    scratch = set()
    for num_pages in (48, 4800):
        large = dataclasses.replace(geometry, num_pages=num_pages, layout=layout)
        abstract = jax.eval_shape(lambda large=large: init_state(TINY, large, dtype=jnp.float32))
        chunk = target.prompt(0, 0, 16)
        lowered = jitted_store(device_of(abstract), "xla").lower(params, *split(abstract), *chunk.values())
        scratch.add(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert len(scratch) == 1


def test_outputs_are_consistent(params, geometry, target, state):
    before = np.asarray(state.ctx_len)
    inputs = batch(target, (1, 0))
    outputs, state = make_decode_step(TINY, geometry)(params, state, inputs)
    n = np.asarray(outputs.num_accepted)
    last = np.asarray(outputs.accepted_tokens)[np.arange(2), n - 1]
    assert np.asarray(outputs.next_tokens).tolist() == np.column_stack([last, outputs.draft_tokens]).tolist()
    assert outputs.kv_rewind.tolist() == (1 - n).tolist()
    assert outputs.target_seq_lens.tolist() == [8, 8]
    assert state.ctx_len[:2].tolist() == (before[:2] + n[::-1]).tolist()
    assert outputs.advertised.tolist() == state.ctx_len[jnp.array([1, 0])].tolist()
    assert outputs.draft_logits is outputs.confidence is outputs.intermediates is None


def test_optional_outputs(params, geometry, target, state):
    options = StepOptions(return_draft_logits=True, return_confidence=True, return_intermediates=True)
    outputs, _ = make_decode_step(TINY, geometry, options)(params, state, batch(target))
    floats = outputs.intermediates
    assert outputs.draft_logits.shape == floats.base_logits.shape == (2, 7, TINY.vocab_size)
    assert floats.context_latents.shape == (16, 2, 32)
    assert floats.block_latents.shape == (2, 2, 7, 32)
    assert jnp.argmax(outputs.draft_logits, -1).tolist() == outputs.draft_tokens.tolist()
    # the heads, from the block's hidden states
    hidden, tokens = np.asarray(floats.block_hidden), np.asarray(outputs.draft_tokens)
    base = hidden @ np.asarray(params.lm_head).T
    np.testing.assert_allclose(floats.base_logits, base, rtol=0, atol=1e-5 * np.abs(base).max())
    bonus = np.asarray(outputs.next_tokens)[:, 0]
    previous = np.column_stack([bonus, tokens[:, :-1]])
    embedded = np.asarray(params.markov_w1)[previous]
    corrected = base + embedded @ np.asarray(params.markov_w2).T
    np.testing.assert_allclose(outputs.draft_logits, corrected, rtol=0, atol=1e-5 * np.abs(corrected).max())
    features = np.concatenate([hidden, embedded], -1)
    confidence = features @ np.asarray(params.confidence_proj)[0] + np.asarray(params.confidence_bias)
    np.testing.assert_allclose(outputs.confidence, confidence, rtol=0, atol=1e-5 * np.abs(confidence).max())


def test_dummy_rows_change_nothing_for_the_others(params, geometry, target, state):
    inputs = batch(target)
    state_before = copied(state)
    alone, after_alone = make_decode_step(TINY, geometry)(params, copied(state), inputs)
    dummy = geometry.dummy_slot
    padded = StepInputs(
        logits=np.concatenate([inputs.logits, inputs.logits]),
        draft_tokens=np.concatenate([inputs.draft_tokens, inputs.draft_tokens]),
        captured=np.concatenate([inputs.captured, inputs.captured]),
        encoded_offsets=target.encoded_offsets([0, 1, dummy, dummy]),
        slots=np.array([0, 1, dummy, dummy], np.int32),
    )
    outputs, after = make_decode_step(TINY, geometry)(params, state, padded)
    for name in ("accepted_tokens", "num_accepted", "draft_tokens", "next_tokens", "kv_rewind", "advertised"):
        assert compare(getattr(outputs, name)[:2], getattr(alone, name)), name
    assert compare(after.ctx_len, after_alone.ctx_len)
    assert outputs.advertised[2:].tolist() == [0, 0]
    # a GEMM of other height may round differently, so where the rows were written is what is compared
    before = np.asarray(state_before.pool)
    assert np.array_equal(np.asarray(after.pool) != before, np.asarray(after_alone.pool) != before)


def test_mixed_batch(params, geometry, target, state):
    """A context row ahead of the gen rows: same drafts and context as without it, zero drafts for the new request."""
    inputs = batch(target)
    alone, _ = make_decode_step(TINY, geometry)(params, copied(state), inputs)
    state = store_prefill_context(params, state, **target.prompt(2, 0, 6))
    context_logits = np.random.default_rng(5).standard_normal((1, TINY.vocab_size)).astype(np.float32)
    mixed = dataclasses.replace(
        inputs,
        logits=np.concatenate([context_logits, inputs.logits]),
        encoded_offsets=target.encoded_offsets([2, 0, 1]),
        num_contexts=1,
    )
    per_row = dataclasses.replace(mixed, slots=np.array([2, 0, 1], np.int32))
    again, _ = make_decode_step(TINY, geometry)(params, copied(state), per_row)
    outputs, state = make_decode_step(TINY, geometry)(params, state, mixed)
    assert compare(outputs.draft_tokens, alone.draft_tokens)
    assert compare(again.draft_tokens, alone.draft_tokens)
    assert compare(again.advertised, outputs.advertised)
    assert compare(outputs.accepted_tokens[1:], alone.accepted_tokens)
    assert compare(outputs.advertised, alone.advertised)
    token = int(context_logits.argmax())
    assert outputs.accepted_tokens[0].tolist() == outputs.next_tokens[0].tolist() == [token] + [0] * 7
    assert outputs.num_accepted[0] == 1
    assert state.ctx_len[2] == 6


def test_pure_context_batch_drafts_nothing(params, geometry, target, state):
    before = copied(state)
    logits = np.random.default_rng(5).standard_normal((2, TINY.vocab_size)).astype(np.float32)
    inputs = StepInputs(
        logits=logits,
        draft_tokens=np.zeros((0, 7), np.int32),
        captured=None,
        encoded_offsets=target.encoded_offsets([2, 3]),
        slots=np.zeros(0, np.int32),
        num_contexts=2,
    )
    outputs, state = make_decode_step(TINY, geometry)(params, state, inputs)
    assert outputs.next_tokens[:, 0].tolist() == logits.argmax(-1).tolist()
    assert outputs.draft_tokens.shape == (0, 7)
    assert outputs.kv_rewind.shape == outputs.advertised.shape == (0,)
    assert compare(state.pool, before.pool)
    assert compare(state.ctx_len, before.ctx_len)


def test_no_drafts_still_accepts_and_stores(params, geometry, target, state):
    before = np.asarray(state.pool).copy()
    outputs, state = make_decode_step(TINY, geometry)(params, state, batch(target, K=0))
    assert outputs.draft_tokens.shape == (2, 0)
    assert outputs.next_tokens.shape == (2, 1)
    assert outputs.num_accepted.tolist() == [1, 1]
    assert outputs.target_seq_lens.tolist() == [1, 1]
    assert state.ctx_len[:2].tolist() == [10, 6]
    written = (np.asarray(state.pool) != before).any(axis=(0, 3))
    assert written.sum() == 2, "one token per request and nothing of a block"


def test_without_captured_features_nothing_is_stored_or_advanced(params, geometry, target, state):
    inputs = dataclasses.replace(batch(target), captured=None)
    before_len, before_pool = np.asarray(state.ctx_len), np.asarray(state.pool).copy()
    without_fc = dataclasses.replace(params, fc=None, hidden_norm=None)
    first, after = make_decode_step(TINY, geometry)(params, copied(state), inputs)
    second, _ = make_decode_step(TINY, geometry)(without_fc, state, batch(target))
    assert compare(after.ctx_len, before_len)
    assert first.advertised.tolist() == second.advertised.tolist() == before_len[:2].tolist()
    changed = (np.asarray(after.pool) != before_pool).any(axis=(0, 3))
    assert changed.sum() == 14, "the block's own latents, 7 per request, and no more"


def test_fewer_drafts_than_the_longest(params, geometry, target, state):
    """The block's width depends on max_draft_len only: K = 3 takes the first three of the same seven slots."""
    long, short = batch(target), batch(target, K=3)
    logits = np.zeros((2, 8, TINY.vocab_size), np.float32)
    logits[:, :, 5] = 1  # the target's token everywhere, and no draft agrees
    drafts, captured = np.zeros((2, 7), np.int32), long.captured.reshape(2, 8, -1)
    long = dataclasses.replace(long, logits=logits.reshape(16, -1), draft_tokens=drafts)
    short = dataclasses.replace(
        short,
        logits=logits[:, :4].reshape(8, -1),
        draft_tokens=drafts[:, :3],
        captured=captured[:, :4].reshape(8, -1),
    )
    seven, _ = make_decode_step(TINY, geometry)(params, copied(state), long)
    three, _ = make_decode_step(TINY, geometry)(params, state, short)
    assert three.draft_tokens.shape == (2, 3)
    assert three.draft_tokens.tolist() == seven.draft_tokens[:, :3].tolist()


def test_dflash_takes_its_drafts_one_slot_later(params, geometry, target, state):
    dflash = dataclasses.replace(TINY, shift_label=False)
    state_of = dataclasses.replace(init_state(dflash, geometry, dtype=jnp.float32), pool=state.pool, ctx_len=state.ctx_len)
    options = StepOptions(return_intermediates=True)
    outputs, _ = make_decode_step(dflash, geometry, options)(params, state_of, batch(target))
    hidden = outputs.intermediates.block_hidden
    assert hidden.shape[1] == 8
    base = np.asarray(hidden)[:, 1:] @ np.asarray(params.lm_head).T
    np.testing.assert_allclose(outputs.intermediates.base_logits, base, rtol=0, atol=1e-5 * np.abs(base).max())


def test_trained_mask_row_is_used(params, geometry, target, state):
    inputs = batch(target)
    same = dataclasses.replace(params, mask_token_embedding=params.embed_tokens[TINY.mask_token_id])
    other = dataclasses.replace(params, mask_token_embedding=-params.embed_tokens[TINY.mask_token_id])
    options = StepOptions(return_draft_logits=True)
    logits = [
        make_decode_step(TINY, geometry, options)(p, copied(state), inputs)[0].draft_logits for p in (params, same, other)
    ]
    assert compare(logits[0], logits[1])
    assert not compare(logits[0], logits[2])


def test_without_a_markov_head_the_drafts_are_the_base_argmax(params, geometry, target, state):
    plain = dataclasses.replace(TINY, markov_rank=0, confidence_head_with_markov=False)
    state = dataclasses.replace(state, config=plain)
    headless = dataclasses.replace(params, markov_w1=None, markov_w2=None)
    options = StepOptions(return_intermediates=True)
    outputs, _ = make_decode_step(plain, geometry, options)(headless, state, batch(target))
    assert jnp.argmax(outputs.intermediates.base_logits, -1).tolist() == outputs.draft_tokens.tolist()


def test_forced_acceptance_counts_its_draws(params, geometry, target, state):
    step = make_decode_step(TINY, geometry, StepOptions(force=1.5))
    for number in range(3):
        outputs, state = step(params, state, batch(target))
        assert set(outputs.num_accepted.tolist()) <= {2, 3}
        assert state.force_counter == number + 1
    _, state = make_decode_step(TINY, geometry, StepOptions(force=2.0))(params, state, batch(target))
    assert state.force_counter == 3, "a whole number draws nothing"


def test_keys_past_the_advertised_length_do_not_matter(params, geometry, target, state):
    """Another request's tokens, NaN or not, behind the stored context of this one."""
    inputs = batch(target)
    outputs, _ = make_decode_step(TINY, geometry, StepOptions(return_draft_logits=True))(params, copied(state), inputs)
    table = inputs.encoded_offsets[0, :, 0] // 2
    stored = np.zeros((48, 4), bool)
    for row, length in enumerate((9, 5)):
        stored[table[row, np.arange(length) // 4], np.arange(length) % 4] = True
    poisoned = dataclasses.replace(state, pool=jnp.where(stored[None, :, :, None], state.pool, jnp.nan))
    again, _ = make_decode_step(TINY, geometry, StepOptions(return_draft_logits=True))(params, poisoned, inputs)
    assert compare(outputs.draft_logits, again.draft_logits)
    assert np.isfinite(np.asarray(again.draft_logits)).all()


def test_a_context_that_outran_its_pages_stays_inside_them(params, geometry, target, state):
    """Two pages for a context of 9: advertised shrinks to leave room for the block, and only own pages are written."""
    inputs = batch(target)
    inputs.encoded_offsets[0, :, 0, 2:] = -1
    before = np.asarray(state.pool)
    outputs, after = make_decode_step(TINY, geometry)(params, copied(state), inputs)
    assert outputs.advertised.tolist() == [1, 1]
    written = (np.asarray(after.pool) != before).any(axis=(0, 2, 3))
    assert set(np.flatnonzero(written)) <= set((inputs.encoded_offsets[0, :, 0, :2] // 2).reshape(-1).tolist())


def spoiled(inputs, **changes):
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x: spoiled(x, encoded_offsets=x.encoded_offsets.astype(np.int64)),
            TypeError,
            "encoded_offsets has dtype int64",
        ),
        (
            lambda x: spoiled(x, encoded_offsets=x.encoded_offsets[:, :1]),
            ValueError,
            "encoded_offsets has 1 rows, the batch has 2",
        ),
        (lambda x: spoiled(x, encoded_offsets=x.encoded_offsets[:0]), ValueError, "has 0 pools, the geometry's pool_idx is 0"),
        (lambda x: spoiled(x, encoded_offsets=x.encoded_offsets[..., :5]), ValueError, "max_blocks_per_seq=12"),
        (
            lambda x: spoiled(x, draft_tokens=np.zeros((2, 8), np.int32)),
            ValueError,
            "K=8 drafts per request, max_draft_len is 7",
        ),
        (lambda x: spoiled(x, draft_tokens=x.draft_tokens.astype(np.float32)), TypeError, "draft_tokens has dtype float32"),
        (lambda x: spoiled(x, draft_tokens=np.zeros((5, 7), np.int32)), ValueError, "5 gen requests, .* max_batch=4 slots"),
        (lambda x: spoiled(x, draft_tokens=np.zeros((0, 7), np.int32)), ValueError, "the batch is empty"),
        (lambda x: spoiled(x, logits=x.logits[:-1]), ValueError, r"logits has shape \[15, 64\], expected \[num_contexts"),
        (lambda x: spoiled(x, captured=x.captured[:, :-1]), ValueError, r"captured has shape \[16, 31\]"),
        (lambda x: spoiled(x, slots=x.slots[:1]), ValueError, r"slots has shape \[1\], expected \[B=2\]"),
        (lambda x: spoiled(x, slots=[0, 1]), TypeError, "slots is a list, expected an array"),
        (lambda x: spoiled(x, num_contexts=-1), ValueError, "num_contexts is -1"),
        (lambda x: spoiled(x, num_contexts=False), ValueError, "num_contexts is False"),
    ],
)
def test_bad_inputs_are_refused_before_dispatch(params, geometry, target, state, change, error, message):
    before = copied(state)
    step = make_decode_step(TINY, geometry)
    with pytest.raises(error, match=message):
        step(params, state, change(batch(target)))
    assert step.compilations == 0
    for name in ("pool", "ctx_len", "force_counter"):
        assert compare(getattr(state, name), getattr(before, name)), name
    _, after = step(params, state, batch(target))  # and the state is still good
    with pytest.raises(error, match=message):  # also by a step that has accepted others
        step(params, after, change(batch(target)))


def test_bad_params_and_states_are_refused(params, geometry, target, state):
    step = make_decode_step(TINY, geometry)
    inputs = batch(target)
    with pytest.raises(ValueError, match=r"params\.lm_head is not set: .* use params\.with_lm_head"):
        step(dataclasses.replace(params, lm_head=None), state, inputs)
    with pytest.raises(ValueError, match=r"params\.lm_head has shape \[64, 31\]"):
        step(params.with_lm_head(params.lm_head[:, :-1]), state, inputs)
    with pytest.raises(ValueError, match=r"markov_w2 has shape \[64, 8\], expected \[V \(of lm_head\)=32"):
        step(params.with_lm_head(params.lm_head[:32]), state, inputs)
    with pytest.raises(ValueError, match=r"state\.pool is bfloat16"):
        step(params, init_state(TINY, geometry), inputs)
    other = dataclasses.replace(geometry, max_ctx=20)
    with pytest.raises(ValueError, match="made for another config or geometry"):
        step(params, init_state(TINY, other, dtype=jnp.float32), inputs)
    with pytest.raises(
        ValueError, match=r"beyond the rope table: state\.rope_cos has shape \[40, 4\], expected at least \[44, 4\]"
    ):
        step(params, dataclasses.replace(state, rope_cos=state.rope_cos[:40]), inputs)
    with pytest.raises(ValueError, match=r"params\.markov_w1 is missing, but the config's markov_rank is 8"):
        step(dataclasses.replace(params, markov_w1=None), state, inputs)
    with pytest.raises(ValueError, match=r"params\.fc and params\.hidden_norm come together"):
        step(dataclasses.replace(params, hidden_norm=None), state, inputs)
    with pytest.raises(ValueError, match="return_confidence is set, but the drafter has no confidence head"):
        make_decode_step(TINY, geometry, StepOptions(return_confidence=True))(
            dataclasses.replace(params, confidence_proj=None), state, inputs
        )
    _, after = step(params, state, inputs)
    with pytest.raises(ValueError, match=r"state\.pool was donated to an earlier call; use the state that call returned"):
        step(params, state, inputs)
    with pytest.raises(ValueError, match=r"params\.lm_head has shape \[64, 31\]"):
        step(params.with_lm_head(params.lm_head[:, :-1]), after, inputs)
    step(params, after, inputs)


def test_every_call_looks_at_its_own_weights(params, geometry, target, state):
    """Weights are known again by what they are, not by what was there before them."""
    step, inputs = make_decode_step(TINY, geometry, StepOptions(return_draft_logits=True)), batch(target)
    other = jax.tree.map(lambda x: x * jnp.asarray(1.5, x.dtype), params)
    narrow = params.with_lm_head(params.lm_head[:, :-1])
    logits = []
    for weights in (params, other, params):
        outputs, _ = step(weights, copied(state), inputs)
        logits.append(outputs.draft_logits)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"params\.lm_head has shape \[64, 31\]"):
                step(narrow, state, inputs)
    assert step.compilations == 1
    assert compare(logits[0], logits[2])
    assert not compare(logits[0], logits[1])
    mine = dataclasses.replace(params)
    last = weakref.ref(mine)
    step(mine, copied(state), inputs)
    del mine, weights
    gc.collect()
    assert last() is None, "the step keeps no weights"


def test_geometry_is_checked(geometry):
    beyond = dataclasses.replace(geometry, max_ctx=TINY.max_position_embeddings + 1)
    for call in (make_decode_step, init_state):
        with pytest.raises(ValueError, match="max_ctx is 1048577, beyond the rope table"):
            call(TINY, beyond)
    with pytest.raises(ValueError, match="drafter's block_size 5 allows 5 drafts"):
        make_decode_step(dataclasses.replace(TINY, block_size=5), geometry)
    with pytest.raises(ValueError, match="page_size is 0, expected at least 1"):
        dataclasses.replace(geometry, page_size=0)
    with pytest.raises(ValueError, match="layout is 'rows'"):
        Geometry(1, 1, 1, 1, 1, 1, layout="rows")


def test_options(monkeypatch, geometry, caplog):
    prologue, overlap = "TLLM_DFLASH_FUSED_PROLOGUE", "TLLM_DFLASH_OVERLAP_CONTEXT_PROJECTION"
    monkeypatch.delenv(prologue, raising=False)
    monkeypatch.delenv(overlap, raising=False)
    assert StepOptions.from_env() == StepOptions()
    monkeypatch.setenv(prologue, "1")
    assert StepOptions.from_env(backend="xla") == StepOptions(fused_prologue=True, backend="xla")
    monkeypatch.setenv(overlap, "1")
    monkeypatch.setenv(prologue, "0")
    assert StepOptions.from_env() == StepOptions(overlap_context_projection=True)
    monkeypatch.setenv(prologue, "yes")
    with pytest.raises(ValueError, match="TLLM_DFLASH_FUSED_PROLOGUE is 'yes', expected 0 or 1"):
        StepOptions.from_env()
    assert hash(StepOptions()) == hash(StepOptions())
    for force in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="StepOptions: force is"):
            StepOptions(force=force)
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        StepOptions(backend="cuda")
    if jax.default_backend() != "gpu":
        with pytest.raises(BackendUnavailable, match="Triton kernels inside JAX need an NVIDIA GPU, and JAX runs on cpu here"):
            make_decode_step(TINY, geometry, StepOptions(backend="triton"))


def test_switches_change_no_bit(params, geometry, target, state):
    inputs = batch(target)
    results = []
    for fused in (False, True):
        for overlap in (False, True):
            options = StepOptions(fused_prologue=fused, overlap_context_projection=overlap, return_draft_logits=True)
            results.append(make_decode_step(TINY, geometry, options)(params, copied(state), inputs))
    for outputs, after in results[1:]:
        for ours, theirs in zip(jax.tree.leaves((outputs, after)), jax.tree.leaves(results[0])):
            assert compare(ours, theirs)


DIVIDED = """
import dataclasses, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jdspark import Geometry, init_state, make_decode_step, store_prefill_context
from jdspark.presets import TINY, random_drafter
from torch_bridge.whole_step import ScriptedTarget

geometry = Geometry(max_batch=2, max_draft_len=7, page_size=8, num_pages=16, max_blocks_per_seq=8, max_ctx=48)
params, state = random_drafter(TINY, 0, dtype="float32"), init_state(TINY, geometry, dtype="float32")
target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
target.grow(0, 36)
mesh = jax.make_mesh((2,), ("tp",))
divided = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "tp")))
inputs, prompt = target.step_inputs(np.zeros((1, 7), np.int32), [0]), target.prompt(0, 0, 8)
step = make_decode_step(TINY, geometry)
for call in (
    lambda: step(params, state, dataclasses.replace(inputs, logits=divided(inputs.logits))),
    lambda: step(dataclasses.replace(params, lm_head=divided(params.lm_head)), state, inputs),
    lambda: store_prefill_context(params, state, **prompt | {"captured": divided(prompt["captured"])}),
):
    try:
        call()
    except ValueError as error:
        print(error)
step(params, state, inputs)
"""


def test_an_operand_that_is_divided_among_devices_is_named():
    """In a process with two devices; the state survives."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", DIVIDED], capture_output=True, text=True, check=False, env=environment,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    what = "is divided among 2 devices, expected it whole on the state's device: jax.device_put(array, device)"
    assert done.stdout.splitlines() == [
        f"decode step: inputs.logits {what}",
        f"decode step: params.lm_head {what}",
        f"store_prefill_context: captured {what}",
    ]
