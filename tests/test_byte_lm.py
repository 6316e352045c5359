"""The byte-level target's checkpoint: what is wrong with one is said, with its file and field or tensor."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jdspark.byte_lm import ByteLMConfig, init_byte_lm, load_byte_lm, named, save_byte_lm
from jdspark.checkpoint import CheckpointError

CONFIG = ByteLMConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, max_position_embeddings=32,
    target_layer_ids=(0, 1),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    save_byte_lm(tmp_path, CONFIG, init_byte_lm(CONFIG, 0))
    return tmp_path


def test_a_saved_model_loads(folder):
    config, params = load_byte_lm(folder)
    assert config == CONFIG
    for name, weight in named(init_byte_lm(CONFIG, 0)).items():
        np.testing.assert_array_equal(named(params)[name], weight)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "x", "hidden_size is 'x', expected a Python integer"),
        ("num_attention_heads", 0, "num_attention_heads is 0, expected at least 1"),
        ("num_attention_heads", 3, "hidden_size is 16, expected a multiple of 2 * num_attention_heads (6)"),
        ("target_layer_ids", [0, 2], "target_layer_ids is 2, expected in [0, 1]"),
        ("target_layer_ids", 1, "target_layer_ids is 1, expected a tuple of layers"),
        ("target_layer_ids", [], "target_layer_ids is (), expected a tuple of layers"),
        ("rope_theta", "10000", "rope_theta is '10000', expected a number above 0"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0, expected a number above 0"),
        ("depth", 3, "missing or unknown fields: depth"),
    ],
)
def test_a_wrong_field_is_named(folder, field, value, message):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=re.escape(message)) as refused:
        load_byte_lm(folder)
    assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"{", "cannot be read as JSON"), (b"\xff", "cannot be read as JSON"), (b"[]", "holds a list")],
)
def test_a_config_that_is_none(folder, content, message):
    file = folder / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))} .*{message}"):
        load_byte_lm(folder)


@pytest.mark.parametrize("left", [None, 0, 100, 5000])
def test_a_weight_file_that_is_missing_or_cut(folder, left):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(content[:left])
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))} cannot be read as safetensors"):
        load_byte_lm(folder)


def test_missing_and_misshapen_tensors_are_named(folder):
    tensors = {name: np.asarray(weight) for name, weight in named(init_byte_lm(CONFIG, 0)).items()}
    save_file({name: weight for name, weight in tensors.items() if name != "norm"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing or unknown tensors: norm$"):
        load_byte_lm(folder)
    save_file(tensors | {"norm": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor norm has shape \[3\], expected \[16\]$"):
        load_byte_lm(folder)
