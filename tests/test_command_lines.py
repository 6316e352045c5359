"""`python -m torch_bridge.parity`, `jdspark info` and the demo, as a user meets them."""

import functools
import json
import re
import subprocess
import sys

import jax
import pytest
import torch

from jdspark import cli, save_drafter
from jdspark.presets import TINY, random_drafter
from torch_bridge import eager, parity, step_parity


def test_parity_report(capsys, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--ops", "next_tokens,context_latents", "--backends", "torch eager", "--cases", "9", "--seed", "3"]
    assert parity.main([*arguments, "--json", str(report)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == "parity: 9/9 cases bit-identical"
    assert lines[-2] == "bounded: 9/9 cases within their bound"
    assert lines[-3] == "repeated: 18/18 cases gave the same bits in a second run"
    written = json.loads(report.read_text())
    assert [(row["op"], row["backends"]) for row in written["exact"]] == [
        ("next_tokens", ["xla", "torch eager"]),
        ("next_tokens", ["xla", "xla twice"]),
        ("context_latents", ["xla", "xla twice"]),
    ]
    assert {row["op"] for row in written["bounded"]} == {"context_latents float32", "context_latents bfloat16"}
    assert all(0 < row["worst"] <= row["bound"] for row in written["bounded"])


def test_parity_exits_1_on_one_wrong_bit(capsys, monkeypatch):
    original = eager.refresh_block_tables

    def off_by_one(encoded_offsets, **static):
        tables, counts = original(encoded_offsets, **static)
        return tables, counts - (counts == 1).int()

    monkeypatch.setattr(eager, "refresh_block_tables", off_by_one)
    assert parity.main(["--ops", "refresh_block_tables", "--backends", "torch eager", "--cases", "32"]) == 1
    output = capsys.readouterr().out
    passed, total = map(int, re.search(r"parity: (\d+)/(\d+) cases bit-identical", output.splitlines()[-1]).groups())
    assert passed < total == 32
    assert "MISMATCH refresh_block_tables (xla / torch eager): " in output
    assert "elements differ, first at" in output


def test_parity_exits_1_past_a_bound(capsys, monkeypatch):
    original = eager.context_latents
    monkeypatch.setattr(eager, "context_latents", lambda *a, **k: original(*a, **k) * 1.05)
    assert parity.main(["--ops", "context_latents", "--backends", "torch eager", "--cases", "4"]) == 1
    assert "bounded: 0/4 cases within their bound" in capsys.readouterr().out


def test_whole_steps(capsys, monkeypatch, tmp_path):
    """A table row per combination and exit status 0, then 1 with a mistake in the twin; one combination of switches here."""
    one = functools.partial(step_parity.run_step_parity, switches=[(True, False)])
    monkeypatch.setattr(step_parity, "run_step_parity", one)
    report = tmp_path / "report.json"
    arguments = ["--whole-step", "--steps", "1", "--layouts", "page_major", "--batches", "1", "--json", str(report)]
    assert parity.main(arguments) == 0
    output = capsys.readouterr().out
    assert re.search(r"page_major │ 1 │ on    │ off     │ 1     │ (\d+)/\1 ", output)
    assert output.splitlines()[-1].startswith("whole step: 1/1 combinations agree")
    (run,) = json.loads(report.read_text())["runs"]
    assert {"state: pool", "draft_tokens"} <= {row["op"] for row in run["exact_rows"]}
    assert {row["bound"] for row in run["bounded_rows"]} == {1e-5}

    original = eager.block_attention
    monkeypatch.setattr(eager, "block_attention", lambda *a, **k: original(*a, **k) * 1.01)
    assert parity.main(arguments) == 1
    output = capsys.readouterr().out
    assert "MISMATCH page_major B=1 fused=on overlap=off: block_hidden (torch): off by" in output
    assert output.splitlines()[-1].startswith("whole step: 0/1 combinations agree")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--whole-step", "--steps", "0"], "--steps is 0, expected at least 1"),
        (["--whole-step", "--batches", "2"], "--layouts are layer_major and page_major, --batches 1 and 4; got"),
        (["--ops", "softmax"], "--ops: unknown softmax; known are refresh_block_tables"),
        (["--cases", "0"], "--cases is 0, expected at least 1"),
        (["--seed", "-1"], "--seed is -1, expected 0 or more"),
        (["--json", "/nowhere/report.json"], "--json: /nowhere/report.json cannot be written"),
        (["--backends", "cuda"], "--backends: unknown 'cuda'; known are pallas"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_parity_refuses_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        parity.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_parity_on_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="2"):
        parity.main(["--device", "gpu"])
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_info(capsys, tmp_path):
    assert cli.main(["info", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["packages"]["jax"].startswith("0.1")
    assert machine["backends"]["xla"] == "available"
    assert set(machine["backends"]) == {"xla", "pallas", "triton", "torch eager", "torch triton"}
    on_gpu = jax.default_backend() == "gpu"
    assert machine["overlap_context_projection"].startswith("concurrent command buffers (" if on_gpu else "none (JAX runs on ")

    save_drafter(tmp_path, TINY, random_drafter(TINY, 0))
    assert cli.main(["info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for line in (
        "markov head: vanilla, rank 8",
        "confidence head: with Markov embedding",
        "drafts come from block slots: 0..K-1 (DSpark, shift_label)",
        "fc.weight: BF16 [32, 32]",
        "missing: none",
        "unknown: none",
        "problems: none",
    ):
        assert line in output


def test_info_names_what_is_wrong_with_a_checkpoint(capsys, tmp_path):
    save_drafter(tmp_path, TINY, random_drafter(TINY, 0))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert cli.main(["info", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "missing: layers.2.input_layernorm.weight" in captured.out
    assert "tensor layers.2.self_attn.q_a_proj.weight is missing" in captured.err
    assert cli.main(["info", str(tmp_path / "nowhere")]) == 1
    assert "config.json does not exist" in capsys.readouterr().err


def test_info_runs_without_torch_being_imported():
    code = "import sys; from jdspark import cli; cli.main(['info']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_demo(capsys, tmp_path):
    from torch_bridge import demo

    arguments = ["--checkpoint", str(tmp_path), "--steps", "3", "--cases", "2", "--layout", "page_major"]
    assert demo.main(arguments) == 0
    output = capsys.readouterr().out
    assert "1 compilation for all of them" in output
    assert "the pool is not copied" in output
    assert re.search(r"parity: (\d+)/\1 cases bit-identical", output)
