"""Training and decoding are the same arithmetic; the trained parts learn; held-out files stay out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

import optax

import jdspark
from jdspark.byte_lm import ByteLMConfig, ByteTarget, causal_forward, init_byte_lm, logits
from jdspark.lossless import Setting, decode_all
from jdspark.pretrained import load_pair
from jdspark.train import drafter as drafter_training
from jdspark.train.__main__ import Recipe, main, train_pair
from jdspark.train.corpus import Corpus, is_held_out, source_files, windows
from jdspark.train.drafter import block_hidden, drafter_for, drafter_loss, init_drafter
from jdspark.train.loop import adamw, schedule

BLOCK, LENGTH = 7, 48
TARGET = ByteLMConfig(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, max_position_embeddings=64,
    target_layer_ids=(0, 2),
)  # fmt: skip
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 40, "markov_rank": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def small_pair():
    """A random target and a drafter with every weight away from its initial value."""
    target = init_byte_lm(TARGET, 0)
    config = drafter_for(TARGET, **SIZES)
    drafter = init_drafter(config, target, 1)
    rng = np.random.default_rng(2)
    shift = lambda w: w + jnp.asarray(0.1 * rng.standard_normal(w.shape), w.dtype)  # noqa: E731
    layers = tuple(
        dataclasses.replace(layer, **{field.name: shift(getattr(layer, field.name)) for field in dataclasses.fields(layer)})
        for layer in drafter.layers
    )
    changed = {
        name: shift(getattr(drafter, name))
        for name in (
            "fc",
            "kv_a_proj",
            "hidden_norm",
            "kv_a_layernorm",
            "norm",
            "markov_w2",
            "confidence_proj",
            "confidence_bias",
        )
    }
    return target, config, dataclasses.replace(drafter, layers=layers, **changed)


@pytest.mark.parametrize(
    ("accepted", "anchor", "layout"),
    [
        (1, 20, "layer_major"),
        (3, 33, "page_major"),
        (8, 17, "page_major"),
        pytest.param(1, 20, "page_major", marks=pytest.mark.long),
        pytest.param(3, 33, "layer_major", marks=pytest.mark.long),
        pytest.param(8, 17, "layer_major", marks=pytest.mark.long),
    ],
)
def test_training_and_decode_step_compute_the_same_block(small_pair, layout, accepted, anchor):
    """One sequence through both: the block of anchor p after a prompt and a step that accepts up to p."""
    target, config, params = small_pair
    rng = np.random.default_rng(anchor)
    tokens = rng.integers(0, 256, (1, LENGTH)).astype(np.int32)
    hidden, captured = causal_forward(target, TARGET, jnp.asarray(tokens))
    anchors = jnp.asarray([[anchor, 5, anchor + 1]])
    trained = block_hidden(params, config, jnp.asarray(tokens), captured, anchors, BLOCK)[0, 0]

    prompt = anchor - accepted
    geometry = jdspark.Geometry(
        max_batch=2, max_draft_len=BLOCK, page_size=8, num_pages=16, max_blocks_per_seq=8, max_ctx=56, layout=layout
    )
    state = jdspark.init_state(config, geometry, dtype=jnp.float32)
    offsets = np.full((1, 1, 2, 8), -1, np.int32)
    offsets[0, 0, 0, :7] = [9, 2, 14, 1, 3, 8, 0]
    state = jdspark.store_prefill_context(
        params, state, captured=np.asarray(captured[0, :prompt]), positions=np.arange(prompt, dtype=np.int32),
        rows=np.zeros(prompt, np.int32), slots=np.zeros(1, np.int32), encoded_offsets=offsets,
    )  # fmt: skip
    # the target has verified the token at `prompt` and 7 drafts, of which the first accepted - 1 are the sequence's
    drafts = tokens[:, prompt + 1 : prompt + 1 + BLOCK].copy()
    verdict = np.array(logits(target, hidden)[0, prompt : prompt + BLOCK + 1])
    for j in range(BLOCK + 1):  # the target's choice: the sequence, as far as it was accepted
        verdict[j, tokens[0, prompt + 1 + j]] = 100.0
    if accepted <= BLOCK:
        drafts[0, accepted - 1] = (drafts[0, accepted - 1] + 1) % 256
    step = jdspark.make_decode_step(config, geometry, jdspark.StepOptions(return_intermediates=True))
    outputs, state = step(params, state, jdspark.StepInputs(
        logits=verdict, draft_tokens=drafts, captured=np.asarray(captured[0, prompt : prompt + BLOCK + 1]),
        encoded_offsets=offsets, slots=np.zeros(1, np.int32),
    ))  # fmt: skip
    assert int(outputs.num_accepted[0]) == accepted
    assert int(state.ctx_len[0]) == anchor
    decoded = np.asarray(outputs.intermediates.block_hidden[0])
    assert decoded.std() > 0.1
    np.testing.assert_allclose(decoded, trained, atol=2e-5, rtol=2e-5)  # fp32: the attentions sum in different orders


def test_a_block_reads_below_its_anchor_and_itself_only(small_pair):
    target, config, params = small_pair
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (1, LENGTH)).astype(np.int32)
    _, captured = causal_forward(target, TARGET, jnp.asarray(tokens))
    anchors = jnp.asarray([[12, 30]])

    def hidden(tokens, captured, anchors):
        return np.asarray(block_hidden(params, config, jnp.asarray(tokens), captured, anchors, BLOCK))

    reference = hidden(tokens, captured, anchors)
    assert np.array_equal(hidden(tokens, captured.at[:, 30:].set(7.0), anchors), reference)
    assert not np.array_equal(hidden(tokens, captured.at[:, 29].add(1.0), anchors)[0, 1], reference[0, 1])
    later = tokens.copy()
    later[0, 13:30] += 1
    assert np.array_equal(hidden(later, captured, anchors), reference)  # of the tokens only the anchors' own are read
    other_block = hidden(tokens, captured, anchors.at[0, 1].set(25))
    assert np.array_equal(other_block[0, 0], reference[0, 0])
    assert not np.array_equal(other_block[0, 1], reference[0, 1])


def test_loss_of_a_perfect_and_of_a_uniform_draft(small_pair):
    """The L1 distance and the acceptance at their ends, from distributions known beforehand."""
    target, config, params = small_pair
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.integers(0, 256, (2, LENGTH)), jnp.int32)
    _, captured = causal_forward(target, TARGET, tokens)
    anchors = jnp.asarray(rng.integers(1, LENGTH - BLOCK, (2, 4)), jnp.int32)
    silent = ("lm_head", "markov_w2", "confidence_proj", "confidence_bias")
    uniform = dataclasses.replace(params, **{name: jnp.zeros_like(getattr(params, name)) for name in silent})
    flat = jnp.zeros((2, LENGTH, TARGET.vocab_size))
    _, metrics = drafter_loss(uniform, config, tokens, captured, flat, anchors, BLOCK)
    np.testing.assert_allclose(metrics["l1"], 0, atol=1e-5)
    np.testing.assert_allclose(metrics["acceptance"], 1 + BLOCK, rtol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy"], np.log(TARGET.vocab_size), rtol=1e-5)
    certain = 1e4 * jnp.eye(TARGET.vocab_size)[jnp.roll(tokens, -1, axis=1)]
    loss, metrics = drafter_loss(uniform, config, tokens, captured, certain, anchors, BLOCK)
    share = 1 / TARGET.vocab_size
    np.testing.assert_allclose(metrics["l1"], 2 * (1 - share), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance"], 1 + sum(share ** (j + 1) for j in range(BLOCK)), rtol=1e-5)
    # confidence is 0 at first: log 2 per slot, whatever the label
    np.testing.assert_allclose(loss, 0.1 * np.log(TARGET.vocab_size) + 0.9 * 2 * (1 - share) + np.log(2), rtol=1e-5)


@pytest.fixture(scope="module")
def loss_arguments(small_pair):
    """Everything `drafter_loss` takes but the weights: random tokens, hidden states and target logits."""
    _, config, _ = small_pair
    rng = np.random.default_rng(6)
    tokens = jnp.asarray(rng.integers(0, 256, (2, LENGTH)), jnp.int32)
    captured = jnp.asarray(rng.standard_normal((2, LENGTH, config.captured_size)), jnp.float32)
    target_logits = jnp.asarray(2 * rng.standard_normal((2, LENGTH, TARGET.vocab_size)), jnp.float32)
    anchors = jnp.asarray([[1, 12, LENGTH - BLOCK - 1], [3, 4, 30]], jnp.int32)
    return config, tokens, captured, target_logits, anchors, BLOCK


def test_the_loss_is_the_published_one(small_pair, loss_arguments):
    """Slot by slot in NumPy: labels, the target's distribution, the true previous token's bias, confidence, weights."""
    _, _, params = small_pair
    config, tokens, captured, target_logits, anchors, _ = loss_arguments
    hidden = np.asarray(block_hidden(params, config, tokens, captured, anchors, BLOCK), np.float64)
    names = ("lm_head", "markov_w1", "markov_w2", "confidence_proj", "confidence_bias")
    lm_head, w1, w2, confidence_proj, confidence_bias = (np.asarray(getattr(params, name), np.float64) for name in names)

    def softmax(x):
        return np.exp(x) / np.exp(x).sum()

    losses, distances, entropies = [], [], []
    for s, block in np.ndindex(anchors.shape):
        total = weights = 0.0
        for j in range(BLOCK):
            at = int(anchors[s, block]) + j
            previous, label = int(tokens[s, at]), int(tokens[s, at + 1])
            drafted = softmax(lm_head @ hidden[s, block, j] + w2 @ w1[previous])
            distance = np.abs(drafted - softmax(np.asarray(target_logits[s, at], np.float64))).sum()
            logit = confidence_proj[0] @ np.concatenate([hidden[s, block, j], w1[previous]]) + confidence_bias[0]
            probability, kept = 1 / (1 + np.exp(-logit)), 1 - distance / 2
            doubt = -(kept * np.log(probability) + (1 - kept) * np.log(1 - probability))
            total += np.exp(-j / 4) * (0.1 * -np.log(drafted[label]) + 0.9 * distance + 1.0 * doubt)
            weights += np.exp(-j / 4)
            distances.append(distance)
            entropies.append(-np.log(drafted[label]))
        losses.append(total / weights)
    loss, metrics = drafter_loss(params, *loss_arguments)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["l1"], np.mean(distances), rtol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy"], np.mean(entropies), rtol=1e-5)


def test_the_confidence_label_teaches_the_confidence_head_only(small_pair, loss_arguments, monkeypatch):
    """`markov_w2` meets the confidence term in its label alone, so the term leaves its gradient as it is."""
    _, _, params = small_pair

    def gradient(name):
        return jax.grad(lambda w: drafter_loss(dataclasses.replace(params, **{name: w}), *loss_arguments)[0])(
            getattr(params, name)
        )

    with_term = gradient("markov_w2")
    assert np.abs(gradient("confidence_proj")).max() > 1e-3
    monkeypatch.setattr(drafter_training, "CONFIDENCE", 0.0)
    np.testing.assert_allclose(with_term, gradient("markov_w2"), atol=1e-8)
    assert not np.any(gradient("confidence_proj"))


def test_the_optimizer_warms_up_clips_and_decays_matrices_only():
    rate = schedule(6e-4, 1000)
    np.testing.assert_allclose([rate(0), rate(20), rate(40), rate(1000)], [0, 3e-4, 6e-4, 6e-5], rtol=1e-5)
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    optimizer = adamw(lambda _: 0.5, 0.1)
    still, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(still["matrix"], -0.05)
    np.testing.assert_array_equal(still["norm"], 0)
    steep = jax.tree.map(lambda leaf: 100 * leaf, params)
    _, moments = optimizer.update(steep, optimizer.init(params), params)
    np.testing.assert_allclose(optax.tree.norm(optax.tree.get(moments, "mu")), 0.1, rtol=1e-5)  # (1 - b1) * clipped to 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-steps", "0"], "--target-steps is 0, expected 1 or more"),
        (["--drafter-steps", "-1"], "--drafter-steps is -1, expected 1 or more"),
        (["--seed", "-1"], "--seed is -1, expected 0 or more"),
        (["--corpus", "no/such/folder"], "no/such/folder has 0 usable *.py files"),
        (["--corpus", "short"], "short has 21 held-out tokens, a window takes 257"),
        (["--corpus", "taken"], "File exists"),
    ],
)
def test_the_command_refuses_before_it_trains(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    for index in range(60):
        (tmp_path / "short" / f"f{index}.py").write_text("x = 1\n" * (1 + 20 * (not is_held_out(f"f{index}.py"))))
    (tmp_path / "taken").touch()
    out = "taken" if "taken" in arguments else "pair"
    with pytest.raises(SystemExit, match="2"):
        main([out, *arguments, "--recipe", "small"])
    captured = capsys.readouterr()
    assert message in captured.err
    assert "target 1" not in captured.out


def test_the_cache_agrees_with_the_whole_sequence():
    """Chunked prefill and verify through the cache give the logits and hidden states of the whole sequence at once."""
    params = init_byte_lm(TARGET, 4)
    target = ByteTarget(TARGET, params)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 256, (2, 40)).astype(np.int32)
    hidden, captured = causal_forward(params, TARGET, jnp.asarray(tokens))
    expected = np.asarray(logits(params, hidden))
    cache = target.init_cache(4, 48)
    slots, zeros = np.array([2, 0], np.int32), np.zeros(2, np.int32)
    first = np.pad(tokens[:, :19], ((0, 0), (0, 13)))
    last, rows, cache = target.prefill(cache, first, zeros, np.array([19, 19], np.int32), slots)
    np.testing.assert_allclose(last, expected[:, 18], atol=1e-5)
    np.testing.assert_allclose(rows[:, :19], captured[:, :19], atol=1e-5)
    second = np.pad(tokens[:, 19:30], ((0, 0), (0, 5)))
    last, rows, cache = target.prefill(cache, second, zeros + 19, np.array([11, 11], np.int32), slots)
    np.testing.assert_allclose(last, expected[:, 29], atol=1e-5)
    rejected = np.concatenate([tokens[:, 30:32], 255 - tokens[:, 32:36]], axis=1)
    at_30, _, cache = target.verify(cache, rejected, zeros + 30, slots)
    np.testing.assert_allclose(at_30[:, :2], expected[:, 30:32], atol=1e-5)
    at_32, rows, cache = target.verify(cache, tokens[:, 32:40], zeros + 32, slots)
    np.testing.assert_allclose(at_32, expected[:, 32:40], atol=1e-5)
    np.testing.assert_allclose(rows, captured[:, 32:40], atol=1e-5)


def test_training_learns_and_writes_a_pair_that_decodes(tmp_path):
    """A few steps on a repetitive corpus: loss falls, drafts are taken, the shared weights are the target's."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(60):
        (corpus / f"f{index}.py").write_text("for i in range(10):\n    print(i)\n" * 30)
    recipe = Recipe(TARGET, SIZES, "float32", 48, 150, 8, 1e-2, 120, 4, 8, 5e-3)
    report = train_pair(recipe, corpus, tmp_path / "pair", 0)
    assert report["target_bits_per_byte"]["held_out"] < 1
    assert report["history"]["drafter"][0]["acceptance"] < report["drafter"]["acceptance"]
    pair = load_pair(tmp_path / "pair")
    assert np.array_equal(pair.params.embed_tokens, pair.target.params.embed_tokens)
    assert np.array_equal(pair.params.lm_head, pair.target.lm_head)
    setting = Setting(1)
    prompt = b"for i in range"
    drafted, _ = decode_all(pair, setting, [prompt], max_new_tokens=24, num_drafts=7, drafting=True)
    own, _ = decode_all(pair, setting, [prompt], max_new_tokens=24, num_drafts=7, drafting=False)
    assert drafted[0].tokens == own[0].tokens
    assert drafted[0].acceptance_length > 1.5


def test_corpus_holds_files_out_by_name(tmp_path):
    names = [f"module_{index}.py" for index in range(200)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n" * 3)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("# not ours\n")
    (tmp_path / "empty.py").write_text("")
    corpus = Corpus.read(tmp_path)
    held_out = [name for name in names if is_held_out(name)]
    assert 0 < len(held_out) == corpus.num_held_out_files < 30
    assert corpus.num_train_files + corpus.num_held_out_files == 200 == len(source_files(tmp_path))
    for tokens, expected in ((corpus.held_out, held_out), (corpus.train, sorted(set(names) - set(held_out)))):
        documents = [bytes(part[1:].astype(np.uint8)) for part in np.split(tokens, np.flatnonzero(tokens == 256))[1:]]
        assert sorted(documents) == sorted((f"# {name}\n" * 3).encode() for name in expected)
    drawn = windows(corpus.train, 5, 16, np.random.default_rng(0))
    assert drawn.shape == (5, 16)
    with pytest.raises(ValueError, match="fewer than one window"):
        windows(corpus.train, 1, len(corpus.train), np.random.default_rng(0))
    with pytest.raises(ValueError, match="too few to train on and hold some out"):
        Corpus.read(tmp_path / "site-packages")
