"""Request ids and slots on the host."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import Geometry, RequestSlots, init_state
from jdspark.presets import TINY

GEOMETRY = Geometry(max_batch=3, max_draft_len=4, page_size=4, num_pages=8, max_blocks_per_seq=8, max_ctx=20)


@pytest.fixture
def requests():
    return RequestSlots(GEOMETRY)


def test_first_free_slot_first(requests):
    assert [requests.admit_chunk(name, 0, 5, 32) for name in "abc"] == [0, 1, 2]
    requests.finish(["b"])
    assert requests.free_slots == [1]
    assert requests.admit_generation("d") == 1  # disaggregated: no prefill here
    assert requests.slots(["c", "d", "a"]).tolist() == [2, 1, 0]
    assert requests.slots(["c"]).dtype == np.int32


def test_unknown_and_padding_ids_use_the_dummy(requests):
    requests.admit_generation("a")
    assert requests.slots(["a", "unknown", None, -1]).tolist() == [0, 3, 3, 3]
    assert "unknown" not in requests
    with pytest.raises(ValueError, match="twice"):
        requests.slots(["a", "a"])


def test_no_free_slot_warns_and_stays_lossless(requests, caplog):
    for name in "abc":
        requests.admit_generation(name)
    with caplog.at_level(logging.WARNING, "jdspark"):
        assert requests.admit_generation("d") == GEOMETRY.dummy_slot
    assert "request 'd': no free slot of 3" in caplog.text
    requests.finish(["a"])
    assert requests.admit_generation("d") == 0


@pytest.mark.parametrize(("tokens", "allocated", "limit"), [(21, 99, 20), (13, 12, 12)])
def test_a_chunk_that_does_not_fit_is_refused_for_that_request_only(requests, caplog, tokens, allocated, limit):
    requests.admit_chunk("a", 0, 5, 32)
    requests.admit_chunk("b", 0, 5, 32)
    with caplog.at_level(logging.WARNING, "jdspark"):
        assert requests.admit_chunk("b", 5, tokens - 5, allocated) == GEOMETRY.dummy_slot
    assert (
        f"request 'b' drafts nothing: its context of {tokens} tokens exceeds min(max_ctx, allocated) = {limit}" in caplog.text
    )
    assert requests.slots(["a", "b"]).tolist() == [0, 3]
    assert requests.free_slots == [1, 2]


def test_later_chunks_append_and_position_zero_starts_afresh(requests, caplog):
    assert requests.admit_chunk("a", 0, 5, 32) == 0
    assert requests.admit_chunk("a", 5, 4, 32) == 0
    assert requests.admit_chunk("a", 0, 7, 32) == 0  # reused id
    with caplog.at_level(logging.WARNING, "jdspark"):
        assert requests.admit_chunk("a", 9, 2, 32) == GEOMETRY.dummy_slot
    assert "its chunk starts at 9, but 7 of its context is stored" in caplog.text
    with caplog.at_level(logging.WARNING, "jdspark"):
        assert requests.admit_chunk("new", 3, 2, 32) == GEOMETRY.dummy_slot
    assert "but nothing of its context is stored" in caplog.text
    with pytest.raises(ValueError, match="num_tokens=0"):
        requests.admit_chunk("a", 0, 0, 32)


def test_a_refused_request_stays_refused_until_it_finishes(requests):
    assert requests.admit_chunk("a", 0, 21, 99) == GEOMETRY.dummy_slot
    assert requests.admit_generation("a") == GEOMETRY.dummy_slot
    assert requests.admit_chunk("a", 0, 5, 99) == 0  # started afresh
    assert requests.admit_generation("a") == 0
    assert requests.admit_chunk("b", 0, 21, 99) == GEOMETRY.dummy_slot
    requests.finish(["b"])
    assert requests.admit_generation("b") == 1


def test_clearing_a_donated_state_loses_nothing(requests):
    state = init_state(TINY, GEOMETRY)
    requests.admit_generation("a")
    requests.finish(["a"])
    gone = dataclasses.replace(state, ctx_len=jnp.full(4, 7, jnp.int32))
    gone.ctx_len.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        requests.clear(gone)
    live = dataclasses.replace(state, ctx_len=jnp.array([7, 7, 7, 0], jnp.int32))
    assert requests.clear(live).ctx_len.tolist() == [0, 7, 7, 0]


def test_finished_slots_are_emptied(requests):
    state = init_state(TINY, GEOMETRY)
    assert requests.clear(state) is state
    for name in "abc":
        requests.admit_generation(name)
    state = dataclasses.replace(state, ctx_len=jnp.array([4, 5, 6, 0], jnp.int32))
    requests.finish(["a", "c", "unknown"])
    state = requests.clear(state)
    assert state.ctx_len.tolist() == [0, 5, 0, 0]
    assert requests.clear(state) is state


def test_a_late_clear_does_not_undo_a_prefill(requests):
    state = init_state(TINY, GEOMETRY)
    requests.admit_generation("a")
    requests.finish(["a"])
    assert requests.admit_chunk("b", 0, 5, 32) == 0
    state = dataclasses.replace(state, ctx_len=jnp.array([5, 0, 0, 0], jnp.int32))  # b's prefill store
    assert requests.clear(state).ctx_len.tolist() == [5, 0, 0, 0]


def test_one_id_is_not_several(requests):
    requests.admit_generation("a")
    for method in (requests.finish, requests.slots):
        with pytest.raises(TypeError, match=rf"{method.__name__}: request_ids is 'a', .* {method.__name__}\(\['a'\]\)"):
            method("a")
    assert "a" in requests
