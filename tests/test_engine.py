"""The engine: what it generates is the target's own continuation, whatever else is in the batch."""

import numpy as np
import pytest

from jdspark import Engine
from jdspark.presets import TINY, random_drafter

from .hashed_target import BIGRAM, HashedTarget, bigram_drafter


def prompts(count, *, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY.vocab_size, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.fixture(scope="module", params=["random-layer_major", "random-page_major", "bigram-layer_major", "bigram-page_major"])
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
        ids = [engine.submit(text, max_new_tokens=3 * number + 1) for number, text in enumerate(prompts(8, seed=2))]
        results = engine.run()
        assert [len(results[request_id].tokens) for request_id in ids] == [3 * number + 1 for number in range(8)]
    assert not compilations


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
