"""`jdspark generate` as a user meets it: the shipped pair, a small number of bytes."""

import argparse
import io
import json
import subprocess
import sys

import pytest

from jdspark import cli
from jdspark.generate import read_prompts

PROMPT = "def quicksort("


def generate(capsys, *arguments):
    assert cli.main(["generate", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def compared():
    """One `--compare --json --plot` run in a process of its own."""
    command = [sys.executable, "-m", "jdspark", "generate", PROMPT, "--max-new-tokens", "40", "--compare", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


def test_compare_and_json(compared):
    assert compared["identical"] is True
    assert compared["steps"] < compared["steps_without_drafting"] == 39
    assert compared["speedup_in_steps"] == pytest.approx(39 / compared["steps"])
    assert compared["acceptance_length"] == pytest.approx(39 / compared["steps"])
    assert len(compared["acceptance_by_position"]) == 7
    assert compared["seconds"] > 0
    assert compared["seconds_without_drafting"] > 0
    (request,) = compared["requests"]
    assert request["prompt"] == PROMPT
    assert request["tokens"] == 40
    assert request["finish_reason"] == "length"


def test_text_is_the_json_runs_text_and_figures_follow(compared, capsys):
    output = generate(capsys, PROMPT, "--max-new-tokens", "40")
    assert output.startswith(PROMPT + compared["requests"][0]["text"])
    assert f"{compared['acceptance_length']:.2f} tokens per step" in output
    assert f"40 tokens in {compared['steps']} steps" in output


def test_prompts_from_a_file_and_from_standard_input(compared, capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompt.py"
    file.write_text(PROMPT)
    arguments = ["--max-new-tokens", "40", "--json"]
    from_file = json.loads(generate(capsys, "--file", str(file), *arguments))
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    from_pipe = json.loads(generate(capsys, *arguments))
    assert from_file["requests"] == from_pipe["requests"] == compared["requests"]


def test_batch_gives_every_prompt_its_own_text(compared, capsys, monkeypatch, tmp_path):
    lines = [PROMPT, r"import os\nimport ", "class Ä:"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n\n"))
    plot = tmp_path / "acceptance.png"
    report = json.loads(
        generate(capsys, "--batch", "--max-new-tokens", "40", "--json", "--max-batch", "2", "--plot", str(plot))
    )
    assert [request["prompt"] for request in report["requests"]] == [PROMPT, "import os\nimport ", "class Ä:"]
    assert report["requests"][0]["text"] == compared["requests"][0]["text"]
    assert report["tokens"] == sum(request["tokens"] for request in report["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sampling_repeats_with_its_seed(capsys):
    arguments = [PROMPT, "--max-new-tokens", "30", "--temperature", "1.0", "--top-p", "0.95", "--json"]
    runs = [json.loads(generate(capsys, *arguments, "--seed", seed))["requests"][0]["text"] for seed in ("5", "5", "6")]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "2 prompts: quote a prompt with spaces"),
        ([""], "the prompt is empty"),
        (["a", "--file", "x"], "a PROMPT and --file are both given"),
        (["--file", "no/such/file"], "no/such/file"),
        (["a", "--compare", "--temperature", "1"], "--compare needs greedy decoding"),
        (["a", "--drafts", "8"], "--drafts is 8, expected 1..7"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["a", "--max-new-tokens", "5000"], "the target has room for 2041"),
        (["a", "--temperature", "-1"], "temperature is -1.0"),
        (["a", "--pair", "no/such/pair"], "no/such/pair"),
        (["a", "--plot", "figure.nonsense"], "figure.nonsense"),
    ],
)
def test_refused_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(["generate", *arguments])
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("jdspark generate: ")
    assert message in error


def test_no_prompt_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(argparse.Namespace(prompts=[], file=None, batch=False))
