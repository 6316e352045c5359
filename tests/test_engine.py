"""The engine: what it generates is the target's own continuation, whatever else is in the batch."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import Engine, Geometry, RequestRefused, SamplingParams, StepOptions
from jdspark.drafter import project_context
from jdspark.presets import TINY, random_drafter
from torch_bridge.whole_step import stored_latents

from .hashed_target import BIGRAM, HashedTarget, bigram_drafter


def prompts(count, *, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY.vocab_size, rng.integers(1, longest)).tolist() for _ in range(count)]


ENGINES = [
    "random-layer_major",
    pytest.param("random-page_major", marks=pytest.mark.long),
    pytest.param("bigram-layer_major", marks=pytest.mark.long),
    "bigram-page_major",
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    """Eight slots of 100 tokens; the drafter knows nothing, or most of what comes."""
    drafter, layout = request.param.split("-")
    target = HashedTarget(mixing=0.4)
    if drafter == "random":
        config, params = TINY, random_drafter(TINY, 0, dtype="float32", lm_head=False)
    else:
        config, params = BIGRAM, bigram_drafter(target)
    return Engine(target, config, params, max_batch=8, max_len=100, page_size=4, layout=layout)


@pytest.mark.parametrize("prefill_chunk", [7, 256])
def test_output_is_the_targets_own_greedy_rollout(engine, prefill_chunk):
    engine._prefill_chunk = prefill_chunk
    for batch in (1, 3, 8):
        texts = prompts(batch, seed=batch)
        ids = [engine.submit(text, max_new_tokens=40) for text in texts]
        results = engine.run()
        assert set(results) == set(ids)
        for request_id, text in zip(ids, texts, strict=True):
            assert list(results[request_id].tokens) == engine.target.rollout(text, 40)
            assert results[request_id].finish_reason == "length"
        lengths = [result.acceptance_length for result in results.values()]
        if engine.config is BIGRAM:
            assert min(lengths) > 1.5
        else:
            assert max(lengths) < 1.5


def test_one_compilation_per_bucket(engine, compilations):
    """Eight requests of different ends pass through every bucket; a second run compiles nothing."""
    for _ in range(2):
        compilations.clear()
        engine.target.verified.clear()
        ids = [engine.submit(text, max_new_tokens=3 * number + 1) for number, text in enumerate(prompts(8, seed=2))]
        results = engine.run()
        assert [len(results[request_id].tokens) for request_id in ids] == [3 * number + 1 for number in range(8)]
    assert not compilations
    assert {(2, 8), (4, 8), (8, 8)} <= set(engine.target.verified) <= {(rows, 8) for rows in (1, 2, 4, 8)}


def test_stop_tokens_end_a_request_inside_an_accepted_run(engine):
    target, inside = engine.target, 0
    for text in prompts(12, seed=3):
        whole = target.rollout(text, 40)
        stop = whole[12]
        first = whole.index(stop)
        request_id = engine.submit(text, max_new_tokens=40, stop_tokens=[stop])
        last = [event for _ in iter(lambda: engine.idle, True) for event in engine.step()][-1]
        result = engine.result(request_id)
        assert list(result.tokens) == whole[: first + 1]
        assert result.finish_reason == last.finish_reason == "stop"
        assert last.tokens[-1] == stop
        inside += sum(result.accepted_drafts) + result.steps > len(result.tokens) - 1
    if engine.config is BIGRAM:
        assert inside > 3  # the last step accepted drafts past the stop token, and they were cut


def test_counts_add_up(engine):
    text = prompts(1, seed=4)[0]
    request_id = engine.submit(text, max_new_tokens=40)
    engine.step()
    before, events = engine.decode_steps, []
    while not engine.idle:
        events += engine.step()
    result = engine.result(request_id)
    assert result.steps == result.drafted_steps + 1 == engine.decode_steps - before == len(events)
    assert result.prompt_length == len(text)
    assert result.acceptance_length == pytest.approx(39 / result.steps)
    # step by step: n accepted tokens are drafts 0 .. n-2; the last step may have been cut
    counts = np.zeros(7, int)
    for event in events[1:-1]:
        counts[: len(event.tokens) - 1] += 1
    assert all(np.array(result.accepted_drafts) - counts >= 0)
    assert all(np.array(result.accepted_drafts) - counts <= 1)
    assert list(result.accepted_drafts) == sorted(result.accepted_drafts, reverse=True)


def test_a_request_may_fill_its_slot(engine):
    """Prompt and new tokens make exactly max_len; the last steps verify positions past it."""
    text = prompts(1, seed=5)[0][:20]
    request_id = engine.submit(text, max_new_tokens=80)
    assert list(engine.run()[request_id].tokens) == engine.target.rollout(text, 80)
    with pytest.raises(RequestRefused, match=r"20 prompt tokens and max_new_tokens=81 make 101 tokens, the engine holds 100"):
        engine.submit(text, max_new_tokens=81)
    with pytest.raises(RequestRefused, match="100 prompt tokens and max_new_tokens=1 "):
        engine.submit([1] * 100, max_new_tokens=1)
    request_id = engine.submit([1] * 99, max_new_tokens=1)
    result = engine.run()[request_id]
    assert (list(result.tokens), result.steps, result.acceptance_length) == (engine.target.rollout([1] * 99, 1), 0, 0)


def check_stored_context(engine, request):
    """In the request's pages lie the latents of the target's hidden states of its tokens, up to its context length."""
    known = [*request.prompt.tolist(), *request.tokens][: request.cached]
    assert engine._state.ctx_len[engine._slots.slot(request.request_id)] == len(known)
    zero, positions = np.zeros(1, np.int32), np.arange(len(known), dtype=np.int32)
    cache = engine.target.init_cache(1, len(known))
    _, captured, _ = engine.target.prefill(cache, np.array([known], np.int32), zero, np.array([len(known)]), zero)
    tables = engine._state.rope_cos, engine._state.rope_sin
    wanted = project_context(engine.params, engine.config, captured[0], jnp.asarray(positions), *tables)
    stored = stored_latents(engine._state, engine._encoded_offsets([request]), positions)
    np.testing.assert_allclose(stored, wanted, rtol=0, atol=1e-5)


def test_the_drafters_context_is_the_targets(engine):
    """After every step each slot's length is the target's, and the stored latents are those of the accepted tokens."""
    engine._prefill_chunk = 7
    texts = dict(zip("abc", prompts(3, seed=6), strict=True))
    for request_id, text in texts.items():
        engine.submit(text, max_new_tokens=25, request_id=request_id)
    for _ in range(12):
        engine.step()
        for request in engine._generating.values():
            assert engine._state.ctx_len[engine._slots.slot(request.request_id)] == request.cached
    assert set(engine._generating) == set(texts)
    for request in engine._generating.values():
        check_stored_context(engine, request)
    engine.run()
    engine.step()
    assert not np.asarray(engine._state.ctx_len).any()  # finished slots are cleared before the next round
    engine._prefill_chunk = 256


def check_ownership(engine):
    """Every live request has its own slot and pages; what is not theirs is free."""
    live = [*engine._prefilling, *engine._generating]
    slots = engine._slots.slots(live).tolist()
    assert len(set(slots)) == len(live) == engine.geometry.max_batch - len(engine._slots.free_slots)
    assert engine.geometry.dummy_slot not in slots
    pages = [page for request_id in live for page in engine._pages.pages(request_id)]
    assert len(set(pages)) == len(pages) == engine.geometry.num_pages - engine._pages.num_free


@pytest.fixture(scope="module")
def small_engine():
    """Three slots and a pool for about two long requests; offsets as a page manager with several pools has them."""
    target = HashedTarget(mixing=0.4)
    geometry = Geometry(
        max_batch=3, max_draft_len=3, page_size=4, num_pages=20, max_blocks_per_seq=12, max_ctx=40, offset_divisor=6, pool_idx=1
    )
    return Engine(target, BIGRAM, bigram_drafter(target), geometry=geometry)


def test_waiting_requests_are_admitted_in_order_as_slots_and_pages_come_free(small_engine):
    engine, target = small_engine, small_engine.target
    lengths = [(4, 30), (4, 20), (10, 20), (2, 1), (1, 12), (3, 36), (8, 6)]
    texts = [[number + 1] * prompt for number, (prompt, _) in enumerate(lengths)]
    ids = [engine.submit(text, max_new_tokens=new) for text, (_, new) in zip(texts, lengths, strict=True)]
    order, waited, first = [], 0, engine.decode_steps
    while not engine.idle:
        engine.step()
        check_ownership(engine)
        if engine.decode_steps - first == 5:
            assert len(engine._generating) == 2
            for request in engine._generating.values():
                check_stored_context(engine, request)
        order += [request_id for request_id in [*engine._prefilling, *engine._generating] if request_id not in order]
        # 10 + 7 of 20 pages: the third request has a slot, but has to wait for pages; nobody overtakes it
        waited += bool(engine._waiting) and bool(engine._slots.free_slots)
    assert waited
    assert order == [request_id for request_id in ids if request_id in order]
    for request_id, text, (_, new) in zip(ids, texts, lengths, strict=True):
        assert list(engine.result(request_id).tokens) == target.rollout(text, new)
    assert engine._pages.num_free == 20


def test_refusals_leave_the_engine_as_it_was(small_engine):
    engine = small_engine
    running = engine.submit([1, 2], max_new_tokens=20, request_id="running")
    engine.step()
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(engine).items()}
    tight = Engine(engine.target, BIGRAM, engine.params, geometry=dataclasses.replace(engine.geometry, num_pages=5))
    with pytest.raises(RequestRefused, match=r"2 prompt tokens and max_new_tokens=19 need 6 pages of 4 tokens with the block's"
                       r" room of 3; a request has 12 \(max_blocks_per_seq\), the pool 5 \(num_pages\)"):  # fmt: skip
        tight.submit([1, 2], max_new_tokens=19)
    bad_calls = [
        ([], {}, ValueError, "prompt_tokens is empty"),
        ([1, 64], {}, ValueError, "prompt_tokens holds 64, expected ids in [0, 64)"),
        ([-1], {}, ValueError, "prompt_tokens holds -1"),
        ([0.5], {}, TypeError, "prompt_tokens is float64[1], expected a sequence of token ids"),
        ([[1]], {}, TypeError, "prompt_tokens is int64[1, 1]"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ([1], {"stop_tokens": [99]}, ValueError, "stop_tokens holds 99"),
        ([1], {"stop_tokens": 9}, TypeError, "stop_tokens is int64[], expected a sequence of token ids"),
        ([1], {"request_id": "running"}, ValueError, "request id 'running' is in use"),
        ([1], {"sampling": "greedy"}, TypeError, "sampling is a str, expected SamplingParams"),
        ([1] * 39, {"max_new_tokens": 2}, RequestRefused, "make 41 tokens, the engine holds 40"),
    ]
    for prompt, arguments, error, message in bad_calls:
        with pytest.raises(error, match=re.escape(message)):
            engine.submit(prompt, **{"max_new_tokens": 1} | arguments)
    with pytest.raises(KeyError, match="request 'running' has not finished yet"):
        engine.result("running")
    for call in (engine.result, engine.cancel):
        with pytest.raises(KeyError, match="'unknown'"):
            call("unknown")
    assert all(vars(engine)[name] == value if isinstance(value, dict) else vars(engine)[name] is value
               for name, value in before.items())  # fmt: skip
    assert list(engine.run()[running].tokens) == engine.target.rollout([1, 2], 20)


def test_cancel(small_engine):
    """While it generates, prefills and waits; the others go on, and what it held is free again."""
    engine = small_engine
    text = [3, 4, 5]
    engine._prefill_chunk = 2
    for name in "abcd":
        engine.submit(text, max_new_tokens=12, request_id=name)
    for _ in range(3):
        engine.step()
    engine.submit(text, max_new_tokens=12, request_id="e")
    engine.cancel("a")
    engine.cancel("d")  # waits for a slot
    engine.step()
    assert list(engine._prefilling) == ["e"]
    engine.cancel("e")
    check_ownership(engine)
    engine.cancel("a")  # a second time changes nothing
    results = engine.run()
    engine._prefill_chunk = 256
    whole = engine.target.rollout(text, 12)
    assert [results[name].finish_reason for name in "abcde"] == ["cancelled", "length", "length", "cancelled", "cancelled"]
    assert list(results["a"].tokens) == whole[: len(results["a"].tokens)]
    assert 0 < len(results["a"].tokens) < 12
    assert results["d"].tokens == results["e"].tokens == ()
    assert list(results["b"].tokens) == list(results["c"].tokens) == whole
    check_ownership(engine)


def test_stream_yields_tokens_as_they_come(small_engine):
    engine = small_engine
    request_id = engine.submit([1, 2], max_new_tokens=10)
    streamed = {request_id: []}
    for name, tokens in engine.stream():
        assert tokens
        if name not in streamed:
            streamed[name] = []
        streamed[name] += tokens
        if len(streamed) == 1:
            streamed[engine.submit([5], max_new_tokens=7)] = []
    for name, tokens in streamed.items():
        assert tokens == list(engine.result(name).tokens)
    assert sorted(map(len, streamed.values())) == [7, 10]


def test_a_step_stays_within_its_prefill_budget(small_engine):
    """Chunks of 8, 8 and 2 tokens under a budget of 12: none is cut, and the first of a step always goes."""
    engine = small_engine
    engine._prefill_chunk, engine._prefill_budget = 8, 12
    ids = [engine.submit([number] * 10, max_new_tokens=9) for number in range(3)]
    seen = []
    for _ in range(4):
        engine.step()
        requests = engine._prefilling | engine._generating
        seen.append([requests[request_id].prefilled for request_id in ids])
    assert seen == [[8, 0, 0], [10, 8, 0], [10, 10, 8], [10, 10, 10]]
    engine.run()
    engine._prefill_chunk, engine._prefill_budget = 256, 1024


def test_nothing_leaks_over_a_thousand_requests(small_engine):
    """Stopped, full, cancelled and refused ones, sampled and greedy; sizes of everything the engine holds do not grow."""
    engine = small_engine
    rng = np.random.default_rng(0)

    def sizes():
        held = (*vars(engine).values(), *vars(engine._slots).values(), *vars(engine._pages).values())
        return [len(value) for value in held if isinstance(value, dict | list | set)], len(jax.live_arrays())

    def run_some(count):
        for _ in range(count):
            text = rng.integers(0, 64, rng.integers(1, 12)).tolist()
            sampling = SamplingParams(temperature=1.0, seed=int(rng.integers(100))) if rng.random() < 0.1 else None
            request_id = engine.submit(text, max_new_tokens=int(rng.integers(1, 7)), stop_tokens=[7], sampling=sampling)
            if rng.random() < 0.05:
                engine.cancel(request_id)
            if rng.random() < 0.05:
                with pytest.raises(RequestRefused):
                    engine.submit(text, max_new_tokens=40)
        results = engine.run()
        assert len(results) == count
        return {result.finish_reason for result in results.values()}

    run_some(50)
    engine.step()
    before = sizes()
    assert run_some(1000) == {"stop", "length", "cancelled"}
    engine.step()
    assert sizes() == before
    assert engine.idle
    assert engine._pages.num_free == 20
    assert engine._slots.free_slots == [0, 1, 2]
    assert not np.asarray(engine._state.ctx_len).any()


def test_without_drafting_the_shapes_are_the_same_and_so_is_the_text(small_engine):
    target, params, geometry = HashedTarget(mixing=0.4), small_engine.params, small_engine.geometry
    texts = prompts(5, seed=7, longest=20)
    modes = {"drafting": {}, "verify": {"drafting": False}, "plain": {"num_drafts": 0}}
    tokens, shapes = {}, {}
    for mode, arguments in modes.items():
        target.verified.clear()
        engine = Engine(target, BIGRAM, params, geometry=geometry, **arguments)
        ids = [engine.submit(text, max_new_tokens=15) for text in texts]
        results = engine.run()
        tokens[mode] = [results[request_id].tokens for request_id in ids]
        shapes[mode] = set(target.verified)
        if mode != "drafting":
            assert all(result.acceptance_length == 1 for result in results.values())
            assert all(result.drafted_steps == 0 for result in results.values())
            assert engine._state is None
    assert [list(row) for row in tokens["drafting"]] == [target.rollout(text, 15) for text in texts]
    assert tokens["drafting"] == tokens["verify"] == tokens["plain"]
    assert {width for _, width in shapes["drafting"]} == {width for _, width in shapes["verify"]} == {4}
    assert {width for _, width in shapes["plain"]} == {1}


@pytest.mark.parametrize("kind", ["dflash", "no context", "no markov", "fewer drafts than the block"])
def test_other_drafters(kind):
    """Lossless whatever the drafter is made of."""
    target, config, arguments = HashedTarget(mixing=0.4), TINY, {}
    if kind == "dflash":
        config = dataclasses.replace(TINY, shift_label=False)
    elif kind == "no markov":
        config = dataclasses.replace(TINY, markov_rank=0, confidence_head_with_markov=False)
    elif kind == "fewer drafts than the block":
        arguments = {"num_drafts": 2, "geometry": Geometry(max_batch=2, max_draft_len=5, page_size=8, num_pages=12,
                                                           max_blocks_per_seq=6, max_ctx=40)}  # fmt: skip
    params = random_drafter(config, 3, dtype="float32", lm_head=False)
    if kind == "no context":
        params = dataclasses.replace(params, fc=None, hidden_norm=None)
    if not arguments:
        arguments = {"max_batch": 2, "max_len": 40, "page_size": 8, "num_drafts": 3}
    engine = Engine(target, config, params, **arguments)
    assert engine.num_drafts == (2 if kind == "fewer drafts than the block" else 3)
    text = [9, 8, 7]
    ids = [engine.submit(text, max_new_tokens=20, sampling=sampling) for sampling in (None, SamplingParams(temperature=1.0))]
    results = engine.run()
    assert list(results[ids[0]].tokens) == target.rollout(text, 20)
    assert len(results[ids[1]].tokens) == 20


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (StepOptions(), {"backend": "xla", "float_backend": None}),
        (StepOptions(backend="pallas"), {"backend": "pallas", "float_backend": None}),
        (StepOptions(backend="xla", float_backend="pallas"), {"backend": "xla", "float_backend": "pallas"}),
    ],
)
def test_prompts_are_stored_by_the_steps_arithmetic(options, wanted, monkeypatch):
    """Or the pool would hold latents of two: one for a prompt, another for what was generated."""
    seen = []

    def record(_, state, **arguments):
        seen.append({name: arguments.get(name) for name in wanted})
        return state

    monkeypatch.setattr("jdspark.engine.store_prefill_context", record)
    target = HashedTarget()
    engine = Engine(target, BIGRAM, bigram_drafter(target), max_batch=1, max_len=20, num_drafts=3, options=options)
    engine.submit([1, 2], max_new_tokens=1)
    engine.run()
    assert seen == [wanted]


def test_constructor_refusals():
    target, params = HashedTarget(), random_drafter(TINY, 0, dtype="float32")
    with pytest.raises(ValueError, match=r"the target captures 32 numbers per token, but the drafter reads 48"):
        Engine(target, dataclasses.replace(TINY, target_hidden_size=24), params)
    with pytest.raises(ValueError, match=r"num_drafts is 9, expected in \[0, 3\]"):
        Engine(target, TINY, params, geometry=Geometry(1, 3, 4, 8, 8, 24), num_drafts=9)
    with pytest.raises(ValueError, match="max_len is 0"):
        Engine(target, TINY, params, max_len=0)
    with pytest.raises(ValueError, match="allows 3 drafts"):
        Engine(target, dataclasses.replace(TINY, block_size=3), params, num_drafts=4)
    with pytest.raises(ValueError, match=r"prefill_chunk is 0"):
        Engine(target, TINY, params, prefill_chunk=0)
    with pytest.raises(ValueError, match=r"options.force is 2.5: a forced acceptance"):
        Engine(target, TINY, params, options=StepOptions(force=2.5))


@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        ("prefill", lambda logits, captured: (logits[:, None], captured), r"Target\.prefill: logits has shape \[1, 1, 64\]"),
        ("prefill", lambda logits, captured: (logits, captured[:, :-1]), r"Target\.prefill: captured has shape .* T=16"),
        ("verify", lambda logits, captured: (logits[..., :-1], captured), r"Target\.verify: logits .* expected .* V=64\]"),
        ("verify", lambda logits, captured: (logits, captured[..., :-1]), r"Target\.verify: captured .* expected .* T\*H_t="),
    ],
)
def test_results_that_are_not_what_a_target_returns_are_named(small_engine, call, change, message):
    target = HashedTarget()
    function = getattr(target, call)

    def wrong(*args):
        logits, captured, cache = function(*args)
        return *change(logits, captured), cache

    setattr(target, call, wrong)
    engine = Engine(target, BIGRAM, small_engine.params, geometry=small_engine.geometry)
    engine.submit([1, 2, 3], max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        engine.run()
