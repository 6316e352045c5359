"""`jdspark generate` as a user meets it: the shipped pair, a small number of bytes."""

import argparse
import io
import json
import os
import subprocess
import sys

import jax
import pytest

from jdspark import cli
from jdspark.generate import Decoding, add_arguments, read_prompts
from jdspark.pretrained import load_pair

PROMPT = "def quicksort("


def arguments_of(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def pipe_in(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


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


def test_one_token_takes_no_step(capsys):
    """The first token is the prompt's: nothing to compare, and no division by it."""
    report = json.loads(generate(capsys, PROMPT, "--max-new-tokens", "1", "--compare", "--json"))
    assert report["identical"] is True
    assert (report["steps"], report["steps_without_drafting"], report["speedup_in_steps"]) == (0, 0, 1)


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
    pipe_in(monkeypatch, PROMPT.encode())
    from_pipe = json.loads(generate(capsys, *arguments))
    assert from_file["requests"] == from_pipe["requests"] == compared["requests"]


def test_batch_gives_every_prompt_its_own_text(compared, capsys, monkeypatch, tmp_path):
    lines = [PROMPT, r"import os\nimport ", "class Ä:"]
    pipe_in(monkeypatch, "\n".join([*lines, "", ""]).encode())
    plot = tmp_path / "acceptance.png"
    report = json.loads(
        generate(capsys, "--batch", "--max-new-tokens", "40", "--json", "--max-batch", "2", "--plot", str(plot))
    )
    assert [request["prompt"] for request in report["requests"]] == [PROMPT, "import os\nimport ", "class Ä:"]
    assert report["requests"][0]["text"] == compared["requests"][0]["text"]
    assert report["tokens"] == sum(request["tokens"] for request in report["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sampling_repeats_with_its_seed(capsys):
    """The second prompt of a batch has the next seed."""
    arguments = ["--batch", "--max-batch", "1", "--max-new-tokens", "30", "--temperature", "1.0", "--top-p", "0.95", "--json"]
    both, second = (
        [request["text"] for request in json.loads(generate(capsys, *prompts, *arguments, "--seed", seed))["requests"]]
        for prompts, seed in (([PROMPT, PROMPT], "5"), ([PROMPT], "6"))
    )
    assert both[0] != both[1]
    assert both[1:] == second


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
        (["a", "--temperature", "nan"], "temperature is nan"),
        (["a", "--temperature", "1", "--seed", "-1"], "seed is -1"),
        (["a", "b", "--batch", "--temperature", "1", "--seed", str(2**32 - 1)], "seed is 4294967296"),
        (["a\udcff"], "prompt 1 of 1 is not UTF-8"),
        (["a", "--pair", "no/such/pair"], "no/such/pair"),
        (["a", "--plot", "figure.nonsense"], "figure.nonsense"),
    ],
)
def test_refused_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(["generate", *arguments])
    assert refused.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jdspark generate: ")
    assert message in captured.err
    assert captured.out == ""  # nothing is begun that is then refused


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what happens without a GPU")
@pytest.mark.parametrize("command", [["generate", "a"], ["lossless", "--prompts", "1", "--max-new-tokens", "2"]])
def test_a_backend_that_is_not_there(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--backend", "triton"])
    captured = capsys.readouterr()
    assert "triton" in captured.err
    assert "need an NVIDIA GPU" in captured.err
    assert captured.out == ""


def test_lossless_refuses_a_report_it_cannot_write_before_it_decodes(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lossless", "--prompts", "1", "--max-new-tokens", "2", "--json", "no/such/report.json"])
    captured = capsys.readouterr()
    assert "no/such/report.json" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("stdin", ["terminal", "closed"])
def test_no_prompt_on_a_terminal(monkeypatch, stdin):
    if stdin == "terminal":
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    else:
        monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(arguments_of())


def test_lines_and_escapes_of_a_batch(monkeypatch):
    r"""Lines end in LF or CR LF, form feeds and the like do not end one; `\n` and `\\` are escapes, `\d` and `\x` none."""
    pipe_in(monkeypatch, b"a\\nb\r\n\r\nre.compile(r'\\d\\x\\b')\nc\x0cd\xc2\x85e\nprint('\\\\n\n")
    assert read_prompts(arguments_of("--batch")) == ["a\nb", r"re.compile(r'\d\x\b')", "c\x0cd\x85e", r"print('\n"]


def test_one_prompt_is_taken_byte_for_byte(monkeypatch, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"a\r\nb\n")
    assert read_prompts(arguments_of("--file", str(file))) == ["a\r\nb\n"]
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=f"--file {file} is not UTF-8: byte 0xff at position 2"):
        read_prompts(arguments_of("--file", str(file)))
    pipe_in(monkeypatch, b"\xfe")
    with pytest.raises(ValueError, match="standard input is not UTF-8: byte 0xfe at position 0"):
        read_prompts(arguments_of("--batch"))


def test_nothing_compiles_while_the_clock_runs(compilations):
    """Three prompts with ends of their own pass through every batch size."""
    prompts = ["a = 1", "def quicksort(", "import os\nimport "]
    decoding = Decoding(load_pair(), arguments_of("--max-new-tokens", "40"), prompts)
    lengths = set()
    original = decoding._decode

    def timed(engine, max_new_tokens, show):
        compilations.clear()
        return original(engine, max_new_tokens, show)

    decoding._decode = timed
    for num_drafts, drafting in ((7, True), (7, False), (0, False)):
        run = decoding.run(num_drafts=num_drafts, drafting=drafting)
        lengths.add(len({result.steps for result in run.results}))
        assert not compilations
    assert max(lengths) == 3


def test_a_reader_that_has_seen_enough_is_no_error():
    """Standard output is closed before the first byte: no message, exit status 1."""
    for arguments in (["info"], ["generate", "a", "--max-new-tokens", "1"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, "-m", "jdspark", *arguments], stdout=write, stderr=subprocess.PIPE, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("rich_is_there", [True, False])
def test_a_long_run_shows_its_progress_if_it_can(rich_is_there, monkeypatch, capsys):
    """Drawn on a terminal's error stream; without the [cli] extra the run goes on all the same."""
    monkeypatch.setattr("jdspark.generate.LONG_RUN", 4)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    if not rich_is_there:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert cli.main(["generate", "a", "b", "--batch", "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert "4 tokens in 1 steps" in captured.out
    assert ("4/4" in captured.err) == rich_is_there
