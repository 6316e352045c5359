"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

from jdspark import save_drafter
from jdspark.presets import SMALL_K3, random_drafter

README = Path(__file__).parent.parent / "README.md"


def run_example(heading):
    """The names that the first marked Python block below a heading leaves behind."""
    section = README.read_text().split(f"## {heading}")[1]
    example = re.search(r"<!-- the tests run this block -->\n```python\n(.*?)```", section, re.DOTALL)
    names = {}
    exec(compile(example[1], str(README), "exec"), names)
    return names


def test_the_step_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_drafter("demo_checkpoint", SMALL_K3, random_drafter(SMALL_K3, 0))
    names = run_example("Use it with your target")
    outputs, state = names["outputs"], names["state"]
    assert outputs.next_tokens.shape == (1, 8)
    assert outputs.draft_tokens.shape == (1, 7)
    assert state.ctx_len[0] == 40 + outputs.num_accepted[0]
    assert outputs.advertised[0] == state.ctx_len[0]


def test_the_engine_example_runs(capsys):
    names = run_example("Text: the shipped pair and the engine")
    printed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert printed == {"add", "import"}
    assert names["engine"].idle
    result = names["result"]
    assert 1 < result.acceptance_length <= 8
    assert len(result.acceptance_by_position) == 7
    assert result.finish_reason == "length"
    assert len(result.tokens) == 40


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_two_commands_come_first(command):
    first_block = re.search(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in first_block.splitlines()] == ["make demo", "make test"]
    assert f"\n{command.removeprefix('make ')}:" in (README.parent / "Makefile").read_text()
