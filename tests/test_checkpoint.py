"""Config and checkpoint loading: every spelling that loads, every error that names its field or tensor."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdspark import CheckpointError, ConfigError, DrafterConfig, inspect_checkpoint, load_drafter, save_drafter
from jdspark.checkpoint import SPELLINGS, required_shapes
from jdspark.presets import K3_DSPARK, TINY, random_drafter

PUBLISHED = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "num_hidden_layers": 5,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
}


def test_published_config():
    config = DrafterConfig.from_json(PUBLISHED)
    assert config == K3_DSPARK
    assert config.shift_label
    assert config.block_width(7) == 7
    assert config.latent_dim == 576
    shapes = required_shapes(config)
    assert len(shapes) == 68
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(3.562e9, rel=2e-4)
    assert shapes["fc.weight"] == (7168, 35840)


def test_null_is_the_same_as_missing():
    absent = {"num_target_layers": None, "block_size": None, "shift_label": None, "rms_norm_eps": None}
    assert DrafterConfig.from_json(PUBLISHED | absent) == K3_DSPARK
    headless = {"markov_rank": None, "markov_head_type": None, "enable_confidence_head": None}
    assert DrafterConfig.from_json(PUBLISHED | headless).markov_rank == 0


def test_mask_token_outside_the_vocabulary_needs_a_trained_row(folder):
    reconfigure(folder, mask_token_id=64)
    with pytest.raises(ConfigError, match="mask_token_id is 64, outside the vocabulary of 64"):
        load_drafter(folder)
    rewrite(folder, lambda tensors: tensors.update(mask_token_embedding=np.ones(32, np.float32)))
    assert load_drafter(folder)[0].mask_token_id == 64


def test_config_round_trip():
    for config in (K3_DSPARK, TINY, dataclasses.replace(TINY, shift_label=False, block_size=8)):
        assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("section", ["dspark_config", "dflash_config"])
def test_head_switches_may_sit_in_a_section(section):
    switches = ("markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids")
    fields = {name: value for name, value in PUBLISHED.items() if name not in switches}
    fields[section] = {name: PUBLISHED[name] for name in switches} | {"shift_label": False, "block_size": 8}
    config = DrafterConfig.from_json(fields)
    assert config == dataclasses.replace(K3_DSPARK, shift_label=False, block_size=8)
    assert config.block_width(7) == 8
    with pytest.raises(ConfigError, match=r"mask_token_id is 163837 in \w+ and 5 in the top level"):
        DrafterConfig.from_json(fields | {"mask_token_id": 5})


def test_rope_scaling_is_the_older_name():
    fields = {name: value for name, value in PUBLISHED.items() if name != "rope_parameters"}
    rope = {name: value for name, value in PUBLISHED["rope_parameters"].items() if name not in ("rope_type", "rope_theta")}
    assert DrafterConfig.from_json(fields | {"rope_scaling": rope | {"type": "yarn"}}) == K3_DSPARK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, "rope_type is 'linear', only 'yarn'"),
        ({"rope_parameters": None}, "rope_scaling is missing .or null.: rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"factor": float("nan")}}, "rope_parameters.factor is nan"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"factor": "32"}}, "rope_parameters.factor is '32'"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"beta_fast": 0}}, "rope_parameters.beta_fast is 0"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"type": "linear"}}, "rope_type is 'linear', 'yarn'"),
        ({"rope_theta": 10000.0}, "rope_theta is 50000 in rope_parameters and 10000.0 at the top level"),
        ({"rope_theta": 1, "rope_parameters": PUBLISHED["rope_parameters"] | {"rope_theta": 1}}, "rope_theta is 1, expected"),
        ({"mask_token_id": -1}, "mask_token_id is -1, expected an integer in"),
        ({"mask_token_id": 3.7}, "mask_token_id is 3.7, expected an integer"),
        ({"mask_token_id": True}, "mask_token_id is True, expected an integer"),
        ({"markov_rank": 8.5}, "markov_rank is 8.5, expected an integer"),
        ({"markov_rank": "8"}, "markov_rank is '8', expected an integer"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true, but markov_rank is 0"),
        ({"shift_label": "false"}, "shift_label is 'false', expected true or false"),
        ({"num_target_layers": 2.0}, "num_target_layers is 2.0, expected an integer"),
        ({"target_layer_ids": "ab"}, "target_layer_ids is 'ab', expected a list"),
        ({"target_layer_ids": [[1]]}, "target_layer_ids is .1., expected an integer"),
        ({"num_target_layers": None, "target_layer_ids": None}, "num_target_layers is missing"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, expected a finite number above 0"),
        ({"target_hidden_size": "16"}, "target_hidden_size is '16'"),
        ({"dspark_config": [1]}, "dspark_config is .1., expected an object"),
        ({"num_hidden_layers": 100000}, "num_hidden_layers is 100000, expected an integer in .1, 1000."),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"attention_factor": 2.0}}, "attention_factor is 2.0"),
        ({"causal": True}, "causal is true"),
        ({"dflash_config": {"causal": True}}, "causal is true"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is true"),
        ({"mla_use_nope": True}, "mla_use_nope is true"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (
            {"kv_lora_rank": None, "qk_rope_head_dim": None, "model_type": "qwen3"},
            r"\(model_type 'qwen3'\): only drafters with multi-head latent attention load",
        ),
        ({"q_lora_rank": 1.5}, "q_lora_rank is 1.5, expected an integer"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63, expected an even number"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"num_target_layers": 4}, "target_layer_ids names 5 layers, but num_target_layers is 4"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_config_errors_name_the_field(change, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_json(PUBLISHED | change)


def test_more_drafts_than_the_block_allows():
    with pytest.raises(ConfigError, match="max_draft_len is 8, but the drafter's block_size 7 allows 7 drafts"):
        dataclasses.replace(TINY, block_size=7).block_width(8)
    with pytest.raises(ConfigError, match="allows 6 drafts"):
        dataclasses.replace(TINY, block_size=7, shift_label=False).block_width(7)


@pytest.fixture(scope="module")
def params():
    return random_drafter(TINY, 0, lm_head=False)


@pytest.fixture
def folder(tmp_path, params):
    save_drafter(tmp_path, TINY, params)
    return tmp_path


def rewrite(folder, change):
    """Apply `change` to the dictionary of tensors in the folder's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def assert_same(loaded, params):
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params)):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(np.asarray(ours).view(np.uint16), np.asarray(theirs).view(np.uint16))


def test_round_trip(folder, params):
    config, loaded = load_drafter(folder)
    assert config == TINY
    assert_same(loaded, params)


def test_other_spellings_and_prefix_load_the_same(folder, params):
    other = {name: spelling for spelling, name in SPELLINGS.items()}

    def rename(tensors):
        for name in list(tensors):
            tensors["model." + other.get(name, name)] = tensors.pop(name)

    rewrite(folder, rename)
    assert_same(load_drafter(folder)[1], params)


def test_shards_with_and_without_an_index(folder, params):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    assert_same(load_drafter(folder)[1], params)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"not.in.the.index": np.zeros(1, np.float32)}, folder / "stray.safetensors")
    assert_same(load_drafter(folder)[1], params)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the shard b\.safetensors, which does not exist"):
        load_drafter(folder)


def test_index_may_not_leave_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected a file of the same folder"):
        load_drafter(folder)


def test_unused_tensors_are_listed_and_skipped(folder, params):
    def add(tensors):
        tensors["lm_head.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    rewrite(folder, add)
    assert inspect_checkpoint(folder).skipped == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    _, loaded = load_drafter(folder)
    assert loaded.lm_head is None
    assert_same(loaded, params)


@pytest.mark.parametrize("shape", [(TINY.hidden_size,), (1, TINY.hidden_size)])
def test_trained_mask_row(folder, shape):
    row = np.arange(TINY.hidden_size, dtype=np.float32)
    rewrite(folder, lambda tensors: tensors.update(mask_token_embedding=row.reshape(shape)))
    _, loaded = load_drafter(folder)
    assert np.array_equal(loaded.mask_token_embedding, row)
    assert loaded.mask_token_embedding.dtype == jnp.float32


def drop(name):
    return lambda tensors: tensors.pop(name)


def reshape(name, shape):
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), r"tensor fc\.weight is missing"),
        (drop("layers.1.self_attn.kv_b_proj.weight"), r"tensor layers\.1\.self_attn\.kv_b_proj\.weight is missing"),
        (drop("markov_w2.weight"), r"tensor markov_w2\.weight is missing"),
        (drop("confidence_proj.bias"), r"tensor confidence_proj\.bias is missing"),
        (reshape("norm.weight", (3,)), r"tensor norm\.weight has shape \[3\], expected \[32\]"),
        (reshape("markov_w1.weight", (64, 9)), r"markov_w1\.weight has shape \[64, 9\], expected \[64, 8\]"),
        (reshape("some.other.weight", (3,)), r"unknown tensors \(a third spelling\?\): some\.other\.weight"),
        (reshape("model.fc.weight", (32, 32)), r"tensor fc\.weight is there twice"),
        (reshape("context_proj.weight", (32, 32)), r"tensor fc\.weight is there twice: \S+ in \S+, \S+ in \S+"),
        (reshape("fc.weight", (32, 32)), r"embed_tokens\.weight is BF16, but fc\.weight is F32"),
    ],
)
def test_tensor_errors_name_the_tensor(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)


def test_every_problem_is_listed_at_once(folder):
    def spoil(tensors):
        del tensors["norm.weight"]
        tensors["input_proj.weight"] = np.zeros(2, np.float32)

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing; unknown tensors .*input_proj\.weight"):
        load_drafter(folder)


def test_dtype_casts_every_weight(folder):
    rewrite(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].astype(np.float32)}))
    _, loaded = load_drafter(folder, dtype="float32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {"float32"}


def test_markov_rank_and_weights_must_agree(folder):
    reconfigure(folder, markov_rank=0, confidence_head_with_markov=False, enable_confidence_head=False)
    with pytest.raises(ConfigError, match=r"markov_rank is 0 or missing, but the checkpoint has Markov weights \(markov_w1"):
        load_drafter(folder)
    reconfigure(folder, markov_rank=8, confidence_head_with_markov=True, enable_confidence_head=True)
    rewrite(folder, lambda tensors: [tensors.pop(f"markov_w{i}.weight") for i in (1, 2)])
    with pytest.raises(ConfigError, match="markov_rank is 8, but the checkpoint has no Markov weights"):
        load_drafter(folder)


def test_unreadable_files(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_drafter(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        load_drafter(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file \(pickled weights are never read"):
        load_drafter(folder)
    for unreadable in ("[" * 100_000, "9" * 5000):
        (folder / "config.json").write_text(unreadable)
        with pytest.raises(CheckpointError, match=r"config\.json (cannot be read as JSON|holds a)"):
            load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_drafter(folder)


def test_saving_refuses_what_would_not_load(tmp_path, params):
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight has shape \[32\], expected \[48\]"):
        save_drafter(tmp_path / "a", dataclasses.replace(TINY, hidden_size=48), params)
    assert not (tmp_path / "a").exists()
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model-00001.safetensors")
    with pytest.raises(CheckpointError, match="write into an empty folder"):
        save_drafter(tmp_path, TINY, params)
