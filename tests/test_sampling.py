"""Sampling keeps the target's distribution, repeats with its seed, and does not depend on who else is in the batch.

Distributions are compared by a chi-square test at a false-alarm probability of 1e-6 with fixed seeds: a run that passes
passes always.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from jdspark import (
    Engine,
    SamplingParams,
    StepOptions,
    init_state,
    make_decode_step,
    ops,
    store_prefill_context,
)
from jdspark.ops.randomness import DRAFT, TARGET, RowSampling, draw, gumbel_noise, token_keys
from jdspark.presets import TINY
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget

from .hashed_target import BIGRAM, HashedTarget, bigram_drafter

FALSE_ALARM = 1e-6

filtered_probabilities = jax.jit(ops.filtered_probabilities)
sampled_chain = jax.jit(ops.sampled_chain)
accept_sampled = jax.jit(ops.accept_sampled, static_argnames="num_contexts")


def rows(count, *, temperature=1.0, top_k=0, top_p=1.0, seeds=None, positions=0):
    """The same sampling for every row, each with a seed of its own."""
    return RowSampling(
        temperature=jnp.full(count, temperature, jnp.float32),
        top_k=jnp.full(count, top_k, jnp.int32),
        top_p=jnp.full(count, top_p, jnp.float32),
        seeds=jnp.arange(count, dtype=jnp.uint32) if seeds is None else jnp.asarray(seeds, jnp.uint32),
        positions=jnp.full(count, positions, jnp.int32),
    )


def exact_probabilities(logits, temperature, top_k, top_p):
    """One row in float64, token by token from the most probable on."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = [token for token in order if not top_k or weights[token] >= weights[order[min(top_k, len(order)) - 1]]]
    total, sum_before, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        if top_p < 1 and sum_before >= top_p and weights[token] < weights[nucleus[-1]]:
            break
        nucleus.append(token)
        sum_before += weights[token] / total
    probabilities = np.zeros(len(logits))
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


def assert_same_distribution(counts, probabilities):
    """Pearson's chi-square; cells that expect fewer than 5 are counted as one."""
    counts, probabilities = np.ravel(counts).astype(float), np.ravel(probabilities)
    assert not counts[probabilities == 0].any(), "a token of probability zero was drawn"
    assert probabilities.sum() == pytest.approx(1)
    expected = probabilities * counts.sum()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    p_value = chi2.sf(statistic, max(used.sum() - 1, 1))
    assert p_value > FALSE_ALARM, f"chi-square {statistic:.1f} over {used.sum()} cells: p = {p_value:.2g}"


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.6), (0, 0.01), (7, 0.8), (99, 0.999)])
def test_filtered_probabilities(temperature, top_k, top_p):
    logits = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32) * 2
    logits[5] = np.round(logits[5])  # ties
    logits[6, :12] = -np.inf
    logits[7] = 0
    got = filtered_probabilities(logits, *rows(20, temperature=temperature, top_k=top_k, top_p=top_p)[:3])
    for row in range(20):
        wanted = exact_probabilities(logits[row], temperature, top_k, top_p)
        assert ((np.asarray(got[row]) > 0) == (wanted > 0)).all(), row
        np.testing.assert_allclose(got[row], wanted, rtol=1e-5)


def test_rows_that_cannot_be_sampled_are_greedy_as_accept_strict():
    nan, inf = np.nan, np.inf
    logits = np.array([[1, 3, 3, 0], [1, nan, 5, nan], [inf, 1, inf, nan], [inf, 1, inf, 2], [-inf] * 4], np.float32)
    tokens, _ = ops.accept_strict(jnp.asarray(logits), jnp.zeros((5, 0), jnp.int32))
    greedy = filtered_probabilities(logits, *rows(5, temperature=0.0)[:3])
    np.testing.assert_array_equal(greedy, np.eye(4)[np.asarray(tokens)[:, 0]])
    np.testing.assert_array_equal(filtered_probabilities(logits[1:], *rows(4)[:3]), greedy[1:])
    tiny = filtered_probabilities(logits[:1] * 1e38, *rows(1, temperature=1e-30)[:3])
    np.testing.assert_array_equal(tiny, [[0, 0.5, 0.5, 0]])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (700, 1.0), (0, 1.0)])
def test_no_token_of_probability_zero_is_drawn(top_k, top_p):
    """Over many almost equal tokens, where rounded cumulative sums miss 1 by more than many a token's probability."""
    V, count = 3000, 4000
    logits = np.random.default_rng(0).standard_normal(V).astype(np.float32) / 10
    logits[np.random.default_rng(1).permutation(V)[:500]] = -np.inf
    sampling = rows(count, top_k=top_k, top_p=top_p)
    probabilities = filtered_probabilities(logits[None], *(x[:1] for x in sampling[:3]))[0]
    noise = gumbel_noise(token_keys(sampling.seeds, sampling.positions, TARGET), V)
    tokens = draw(noise, jnp.tile(probabilities, (count, 1)))
    assert (np.asarray(probabilities)[np.asarray(tokens)] > 0).all()
    wanted = exact_probabilities(logits, 1.0, top_k, top_p)
    by_hundred = np.arange(V) // 100
    counts = np.bincount(by_hundred[np.asarray(tokens)], minlength=30)
    assert_same_distribution(counts, np.bincount(by_hundred, weights=wanted, minlength=30))


V, K = 5, 2
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.8},
]


def tables(seed=0):
    """The target's logits after each pair of tokens, and a drafter's base and Markov logits, far from them."""
    rng = np.random.default_rng(seed)
    target = (1.5 * rng.standard_normal((V, V, V))).astype(np.float32)
    base = rng.standard_normal((K, V)).astype(np.float32)
    markov = (1.5 * rng.standard_normal((V, V))).astype(np.float32)
    return target, base, markov


@functools.partial(jax.jit, static_argnums=0)
def three_tokens(count, sampling):
    """Draft two tokens behind the pair (1, 0), accept, and let the target alone add what is missing to three."""
    target, base, markov = map(jnp.asarray, tables())
    first = 10
    chain_sampling = sampling._replace(positions=sampling.positions + first)
    _, q, drafts = sampled_chain(
        jnp.tile(base, (count, 1, 1)), jnp.zeros(count, jnp.int32), jnp.eye(V), markov.T, chain_sampling
    )
    # the token before each pair's second one, with the drafts behind the known pair
    tokens = jnp.concatenate([jnp.tile(jnp.array([1, 0]), (count, 1)), drafts], axis=1)
    logits = jnp.stack([target[tokens[:, i], tokens[:, i + 1]] for i in range(K + 1)], axis=1)
    accepted, n = accept_sampled(logits.reshape(-1, V), drafts, q, chain_sampling)
    out = jnp.concatenate([tokens[:, :2], accepted], axis=1)
    for i in range(1, 3):
        alone, _ = accept_sampled(
            target[out[:, i], out[:, i + 1]], jnp.zeros((count, 0), jnp.int32), jnp.zeros((count, 0, V)),
            chain_sampling._replace(positions=chain_sampling.positions + i),
        )  # fmt: skip
        out = out.at[:, i + 2].set(jnp.where(n > i, out[:, i + 2], alone[:, 0]))
    return out[:, 2:], n


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_accepted_tokens_are_distributed_as_the_targets(settings):
    count = 40_000
    out, n = three_tokens(count, rows(count, **settings))
    out, n = np.asarray(out), np.asarray(n)
    assert (np.bincount(n, minlength=4)[1:] > count / 50).all(), "every accepted length occurs often"
    filters = (settings["temperature"], settings.get("top_k", 0), settings.get("top_p", 1.0))
    target, base, _ = tables()
    p = np.array([[exact_probabilities(target[a, b], *filters) for b in range(V)] for a in range(V)])
    joint = p[1, 0][:, None, None] * p[0][:, :, None] * p
    counts = np.zeros((V, V, V))
    np.add.at(counts, tuple(out.T), 1)
    assert_same_distribution(counts, joint)
    # and the drafts are far from it: what a drafter proposes first is not what comes out
    q = exact_probabilities(base[0] + tables()[2][0], *filters)
    assert np.abs(q - p[1, 0]).sum() / 2 > 0.2


def test_a_drafter_that_knows_the_target_is_always_accepted():
    logits = np.random.default_rng(0).standard_normal((1, K + 1, V)).astype(np.float32)
    count = 2000
    sampling = rows(count, temperature=0.8, top_p=0.9)
    base = jnp.tile(logits[:, :K], (count, 1, 1))
    _, q, drafts = sampled_chain(base, jnp.zeros(count, jnp.int32), None, None, sampling)
    _, n = accept_sampled(jnp.tile(logits, (count, 1, 1)).reshape(-1, V), drafts, q, sampling)
    assert (np.asarray(n) == K + 1).mean() > 0.999  # p and q may differ in their last bit


def test_chosen_drafts_keep_the_distribution():
    """A draft that was not drawn, with one at itself; q narrower than the target's vocabulary."""
    count = 20_000
    logits = np.random.default_rng(3).standard_normal(V).astype(np.float32)
    q = jnp.tile(jnp.array([0.0, 1.0]), (count, 1, 1))
    tokens, n = accept_sampled(jnp.tile(logits, (2 * count, 1)), jnp.ones((count, 1), jnp.int32), q, rows(count))
    tokens, n = np.asarray(tokens), np.asarray(n)
    p = exact_probabilities(logits, 1.0, 0, 1.0)
    assert_same_distribution(np.bincount(tokens[:, 0], minlength=V), p)
    assert ((n == 2) == (tokens[:, 0] == 1)).all()
    assert_same_distribution(np.bincount(tokens[n == 2, 1], minlength=V), p)


@pytest.mark.parametrize("draft", [-1, V, 2**31 - 1])
def test_a_draft_outside_the_vocabulary_is_rejected(draft):
    """Also where clipping would make a likely token of it."""
    logits = np.full((2 * 100, V), -9, np.float32)
    logits[:, [0, V - 1]] = 9
    drafts = jnp.full((100, 1), draft, jnp.int32)
    tokens, n = accept_sampled(logits, drafts, jnp.full((100, 1, V), 1e-6), rows(100))
    assert (np.asarray(n) == 1).all()
    assert set(np.asarray(tokens)[:, 0].tolist()) == {0, V - 1}


def test_greedy_rows_equal_the_greedy_ops():
    """Bit for bit, with any draft probabilities, mixed with rows that sample, context rows first."""
    rng = np.random.default_rng(0)
    B, contexts, K, V = 6, 2, 4, 16
    logits = np.round(rng.standard_normal((contexts + B * (K + 1), V)) * 2).astype(np.float32)  # with ties
    greedy_tokens = logits[contexts:].reshape(B, K + 1, V).argmax(2)
    drafts = rng.integers(0, V, (B, K)).astype(np.int32)
    for row in range(B):
        drafts[row, : row % (K + 1)] = greedy_tokens[row, : row % (K + 1)]
    drafts[5, 2] = -1
    q = rng.dirichlet(np.ones(V), (B, K)).astype(np.float32)
    q[3] = 0
    sampling = rows(contexts + B, temperature=0.0)
    temperature = sampling.temperature.at[jnp.array([0, 4])].set(1.0)
    mixed = sampling._replace(temperature=temperature)
    greedy = np.asarray(temperature) == 0
    strict = ops.accept_strict(jnp.asarray(logits), drafts, num_contexts=contexts)
    sampled = accept_sampled(logits, drafts, q, mixed, num_contexts=contexts)
    for got, wanted in zip(sampled, strict, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[greedy], np.asarray(wanted)[greedy])

    base = rng.standard_normal((B, K, V)).astype(np.float32)
    anchor = rng.integers(0, V, B).astype(np.int32)
    w1, w2 = (jnp.asarray(rng.standard_normal((V, 3)), jnp.bfloat16) for _ in range(2))
    wanted_logits, wanted = jax.jit(ops.markov_chain)(base, anchor, w1, w2)
    got_logits, q, got = sampled_chain(base, anchor, w1, w2, mixed.gen_rows(contexts))
    greedy = greedy[contexts:]
    np.testing.assert_array_equal(np.asarray(got)[greedy], np.asarray(wanted)[greedy])
    np.testing.assert_array_equal(np.asarray(got_logits)[greedy], np.asarray(wanted_logits)[greedy])
    np.testing.assert_array_equal(np.asarray(q)[greedy], np.eye(V)[np.asarray(wanted)[greedy]])


@pytest.fixture(scope="module")
def engine():
    """The drafter proposes from the pairs alone, which the hash of the prefix outweighs: about half is rejected."""
    target = HashedTarget(mixing=1.0)
    return Engine(target, BIGRAM, bigram_drafter(target), max_batch=8, max_len=40, page_size=8, num_drafts=3)


SHARP = SamplingParams(temperature=1.2, top_k=2, seed=5)


def generated(engine, requests, num_tokens=12):
    """Tokens of requests that are all submitted before the first step, `(prompt, sampling)` each."""
    ids = [engine.submit(prompt, max_new_tokens=num_tokens, sampling=sampling) for prompt, sampling in requests]
    results = engine.run()
    return [results[request_id].tokens for request_id in ids]


@pytest.mark.parametrize("drafting", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_engine_keeps_the_targets_distribution(engine, drafting):
    """Joint distribution of five tokens, top 2 of 64 each: the first from the prompt, the others through decode steps."""
    if not drafting:
        engine = Engine(engine.target, BIGRAM, engine.params, geometry=engine.geometry, drafting=False)
    # behind it token 0, which the first step verifies in place of drafts, is among the two whatever comes first
    prompt, count, length = [55, 46, 10, 41, 2], 1600, 5
    assert all(0 in np.argsort(-engine.target.logits([*prompt, v]))[:2] for v in np.argsort(-engine.target.logits(prompt))[:2])
    settings = (1.2, 2, 1.0)
    requests = [(prompt, SamplingParams(*settings, seed=1000 + number)) for number in range(count)]
    tokens = generated(engine, requests, length)
    probabilities = {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, probability in probabilities.items():
            filtered = exact_probabilities(engine.target.logits(prompt + list(prefix)), *settings)
            longer |= {(*prefix, int(v)): probability * filtered[v] for v in np.flatnonzero(filtered)}
        probabilities = longer
    assert len(probabilities) == 2**length
    assert set(tokens) <= set(probabilities)
    counts = [tokens.count(sequence) for sequence in probabilities]
    assert_same_distribution(counts, np.array(list(probabilities.values())))


def test_seeds_repeat_and_differ(engine):
    requests = [([1, 2, 3], SamplingParams(temperature=1.5, seed=seed)) for seed in (0, 1, 2**32 - 1)]
    first = generated(engine, requests)
    assert first == generated(engine, requests)
    assert len(set(first)) == 3
    assert len(set(generated(engine, [([1, 2, 3], SamplingParams(temperature=1.5))] * 2))) == 1  # one seed, two requests


def test_neighbours_row_and_slot_do_not_change_a_sample(engine):
    """In batches of one bucket (5 to 8 requests): other neighbours, another row, another slot, chunks in between."""
    wanted = ([7, 8, 9], SHARP)
    others = [([number] * (1 + 3 * number), SamplingParams(temperature=2.0, seed=number)) for number in range(7)]
    alone = generated(engine, [wanted, *others[:4]])[0]
    assert generated(engine, [*others[3:], wanted, *others[:3]])[4] == alone
    greedy = [(prompt, None) for prompt, _ in others]
    assert generated(engine, [*greedy, wanted])[7] == alone


def test_greedy_requests_beside_sampled_ones(engine):
    """They give the greedy result, also when the sampling ones join and leave while they run."""
    prompts = [[5, 6], [7] * 9, [9, 1, 3]]
    ids = [engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
    used = []
    while not engine.idle:
        if engine.decode_steps % 4 == 2:
            engine.submit([2, 3], max_new_tokens=4, sampling=SHARP)
        engine.step()
        used.append(any(request.drawn for request in engine._generating.values()))
        if len(used) > 40:
            break
    results = engine.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(results[request_id].tokens) == engine.target.rollout(prompt, 30)
    switches = sum(a != b for a, b in itertools.pairwise(used))
    assert switches >= 4, "the engine went from greedy to sampling steps and back"


def test_drafts_of_a_drafter_that_knows_the_target_are_accepted(engine, monkeypatch):
    """At a high temperature, where a draft treated as chosen (q = 1) would keep the distribution, but hardly be accepted."""
    monkeypatch.setattr(engine, "target", HashedTarget(mixing=0.0))
    ids = [engine.submit([number], max_new_tokens=38, sampling=SamplingParams(temperature=2.0)) for number in range(2)]
    results = engine.run()
    for request_id in ids:
        result = results[request_id]
        assert result.steps <= 1 + 36 / 4 + 1  # the first has no drafts, the others accept all three
        assert min(result.acceptance_by_position) == 1


def test_one_compilation_per_bucket_while_sampling(engine, compilations):
    for seed, counts in ((0, (1, 3, 2)), (1, (1, 2, 3, 1))):  # behind a step of so many rows one of fewer or more
        compilations.clear()
        for count in counts:
            generated(engine, [([1], SamplingParams(temperature=1, seed=seed + n)) for n in range(count)], 4)
    assert not compilations


@pytest.fixture
def step_batch(params, geometry):
    """A state with two requests, and a batch of one context row, these two and a padding row."""
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    state = init_state(TINY, geometry, dtype=jnp.float32)
    for slot in range(3):
        target.grow(slot, 30)
    for slot, length in ((0, 9), (1, 5)):
        state = store_prefill_context(params, state, **target.prompt(slot, 0, length))
    drafts = np.random.default_rng(1).integers(0, 64, (3, 4)).astype(np.int32)
    return state, target.step_inputs(drafts, [0, 1, geometry.dummy_slot], [2])


def test_a_step_that_samples_at_temperature_zero_is_the_greedy_step(params, geometry, step_batch):
    state, inputs = step_batch
    greedy = make_decode_step(TINY, geometry, StepOptions(return_draft_logits=True))
    sampling = make_decode_step(TINY, geometry, StepOptions(return_draft_logits=True, sampling=True))
    wanted, wanted_state = greedy(params, jax.tree.map(jnp.copy, state), inputs)
    q = np.full((3, 4, 64), 1 / 64, np.float32)
    inputs = dataclasses.replace(inputs, sampling=rows(4, temperature=0.0), draft_probabilities=q)
    got, got_state = sampling(params, state, inputs)
    drafted = got.draft_probabilities
    assert compare(drafted, jax.nn.one_hot(wanted.draft_tokens, 64))
    for a, b in zip(jax.tree.leaves(dataclasses.replace(got, draft_probabilities=None)), jax.tree.leaves(wanted), strict=True):
        assert compare(a, b)
    for a, b in zip(jax.tree.leaves(got_state), jax.tree.leaves(wanted_state), strict=True):
        assert compare(a, b)


def test_a_step_draws_each_row_by_its_own_settings(params, geometry, step_batch):
    """The context row, a greedy row and a sampling row: the ops' own results, at the positions of each."""
    state, inputs = step_batch
    sampling = rows(4)._replace(temperature=jnp.array([2.0, 0.0, 1.5, 0.0]), positions=jnp.array([20, 10, 6, 0], jnp.int32))
    q = jax.nn.one_hot(inputs.draft_tokens, 64)
    step = make_decode_step(TINY, geometry, StepOptions(sampling=True, return_draft_logits=True))
    outputs, _ = step(params, state, dataclasses.replace(inputs, sampling=sampling, draft_probabilities=q))
    tokens, n = accept_sampled(inputs.logits, inputs.draft_tokens, q, sampling, num_contexts=1)
    assert compare(outputs.accepted_tokens, tokens)
    assert compare(outputs.num_accepted, n)
    noise_row = sampling.positions[2] + n[2] + jnp.arange(4)
    noise = gumbel_noise(token_keys(jnp.full(4, 2), noise_row, DRAFT), 64)
    assert compare(outputs.draft_tokens[1], draw(noise, outputs.draft_probabilities[1]))
    wanted = exact_probabilities(outputs.draft_logits[1, 0], 1.5, 0, 1.0)
    np.testing.assert_allclose(outputs.draft_probabilities[1, 0], wanted, rtol=1e-4)


def test_the_step_and_its_inputs_must_agree_about_sampling(params, geometry, step_batch):
    state, inputs = step_batch
    sampled = dataclasses.replace(inputs, sampling=rows(4), draft_probabilities=np.zeros((3, 4, 64), np.float32))
    with pytest.raises(ValueError, match=r"inputs\.sampling is there, but the step was made with StepOptions\.sampling=False"):
        make_decode_step(TINY, geometry)(params, state, sampled)
    step = make_decode_step(TINY, geometry, StepOptions(sampling=True))
    with pytest.raises(ValueError, match=r"inputs\.sampling is missing, but the step was made with StepOptions\.sampling=True"):
        step(params, state, inputs)
    with pytest.raises(ValueError, match=r"inputs\.draft_probabilities is missing"):
        step(params, state, dataclasses.replace(sampled, draft_probabilities=None))
    with pytest.raises(ValueError, match=r"sampling\.temperature has shape \[3\], expected \[rows=4\]"):
        step(params, state, dataclasses.replace(sampled, sampling=rows(3)))
    with pytest.raises(TypeError, match=r"sampling is a SamplingParams, expected a RowSampling, .* jdspark\.row_sampling"):
        step(params, state, dataclasses.replace(sampled, sampling=SamplingParams(0.8)))
    assert not state.pool.is_deleted()
    assert {"accept_sampled", "sampled_chain"} < set(step.explain(params, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e39}, "temperature is 1e.39, expected a finite number that fits into float32"),
        ({"temperature": "1"}, "temperature is '1', expected a number"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_sampling_params_refusals(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**fields)


def test_step_refusals():
    with pytest.raises(ValueError, match=r"force is 1\.0 and sampling is on"):
        StepOptions(force=1.0, sampling=True)
    logits, drafts, q = jnp.zeros((6, 9)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2, 9))
    with pytest.raises(ValueError, match=r"sampling.temperature has shape \[3\], expected \[rows=2\]"):
        ops.accept_sampled(logits, drafts, q, rows(3))
    with pytest.raises(ValueError, match=r"draft_probabilities has shape \[2, 1, 9\]"):
        ops.accept_sampled(logits, drafts, q[:, :1], rows(2))
    with pytest.raises(ValueError, match=r"the width V. of draft_probabilities is 10"):
        ops.accept_sampled(logits, drafts, jnp.zeros((2, 2, 10)), rows(2))
    with pytest.raises(TypeError, match=r"sampling\.seeds has dtype int32, expected uint32"):
        ops.sampled_chain(q, jnp.zeros(2, jnp.int32), None, None, rows(2)._replace(seeds=jnp.zeros(2, jnp.int32)))
    with pytest.raises(ValueError, match="w1 and w2 come together"):
        ops.sampled_chain(q, jnp.zeros(2, jnp.int32), jnp.zeros((9, 2)), None, rows(2))
