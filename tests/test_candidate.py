"""Somebody's own implementation of one op, compared with ours: right, wrong, broken and misnamed ones."""

import os

import pytest
import torch

from torch_bridge import eager
from torch_bridge.parity import compare_candidate, main, parity_ok

MODULE = """
from torch_bridge import eager

def right(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, *, layout, first_row):
    return eager.store_gen_context(
        pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout=layout, first_row=first_row
    )

def zeroes_the_rejected(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, *, layout, first_row):
    tokens = latents.shape[0] // max(slots.shape[0], 1)
    place = (ctx_len * 0).new_tensor(range(tokens)).to(latents.device)
    kept = (place[None, :] < num_accepted[:, None].clamp(1, tokens)).reshape(-1, 1, 1)
    latents = latents.where(kept, latents.new_zeros(()))
    return right(pool, latents, ctx_len, slots, num_accepted, block_tables, block_counts, layout=layout, first_row=first_row)

def broken(*operands, **static):
    raise RuntimeError("not written yet")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_ops.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_ops", raising=False)
    assert os.getcwd() == str(tmp_path)
    return "my_ops"


def command(*arguments):
    return main(["--ops", "store_gen_context", "--cases", "8", *arguments])


def test_a_right_one_passes(module, capsys):
    assert command("--candidate", f"{module}:right") == 0
    assert "parity: 8/8 cases bit-identical" in capsys.readouterr().out


def test_the_sign_of_a_rejected_token_is_noticed(module, capsys):
    """A plausible mistake: zero instead of the product with zero."""
    assert command("--candidate", f"{module}:zeroes_the_rejected") == 1
    printed = capsys.readouterr().out
    assert "MISMATCH store_gen_context (xla / candidate)" in printed
    assert "0.0 against -0.0" in printed


def test_one_that_raises_is_a_mismatch(module, capsys):
    assert command("--candidate", f"{module}:broken") == 1
    assert "raised RuntimeError" in capsys.readouterr().out.replace("\n", " ")


def test_a_pool_that_is_not_updated_in_place_is_noticed():
    def into_a_copy(pool, **operands):
        return eager.store_gen_context(pool.clone(), **operands)

    (row,), _ = compare_candidate("store_gen_context", into_a_copy, cases=4)
    assert row.passed == 0
    assert all("pool was not updated in place" in failure for failure in row.failures)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda values: None, "0 results, expected 1"),
        (lambda values: (values, values), "2 results, expected 1"),
        (lambda values: values[:, :1], "output 0: shape {short} against {shape}"),
        (lambda values: values.double(), "output 0: dtype float64 against {dtype}"),
        (lambda values: 3.0, "raised ValueError: result 0 is a float, expected a tensor"),
    ],
    ids=["none", "one more", "wrong shape", "wrong dtype", "no tensor"],
)
def test_other_results_are_mismatches_of_an_op_that_rounds(result, problem):
    expected = []

    def candidate(x, weight, *, eps):
        values = eager.rms_norm(x, weight, eps)
        dtype, shape = str(values.dtype).removeprefix("torch."), list(values.shape)
        expected.append(problem.format(dtype=dtype, shape=shape, short=[shape[0], 1, *shape[2:]]))
        return result(values)

    _, bounded = compare_candidate("rms_norm", candidate, cases=4)
    assert [row.passed for row in bounded] == [0] * len(bounded)
    assert sorted(failure.split(": ", 1)[1] for row in bounded for failure in row.failures) == sorted(expected)
    assert len(expected) == 4


def test_a_missing_result_of_an_op_that_rounds_is_a_mismatch():
    returned = []

    def only_the_pool(**operands):
        pool, latents = eager.norm_rope_store(**operands)
        returned.append(latents is not None)
        return pool

    _, bounded = compare_candidate("norm_rope_store", only_the_pool, cases=8)
    failures = [failure for row in bounded for failure in row.failures]
    assert 0 < len(failures) == sum(returned)
    assert all(failure.endswith("1 results, expected 2") for failure in failures)


def test_a_triton_kernel_of_an_exact_op_can_be_a_candidate_without_a_gpu(capsys):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off")
    assert command("--candidate", "torch_bridge.triton_kernels:store_gen_context", "--cases", "4") == 0
    printed = capsys.readouterr().out
    assert "parity: 4/4 cases bit-identical" in printed
    assert "bounded" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--candidate", "my_ops"), "not of the form module:function"),
        (("--candidate", "my_ops:nobody"), "has no attribute 'nobody'"),
        (("--candidate", "nowhere_at_all:f"), "No module named"),
        (("--candidate", "my_ops:right", "--ops", "store_gen_context,noise_block"), "the one op that it implements"),
        (("--candidate", "my_ops:right", "--against", "cuda"), "'cuda' has no store_gen_context"),
    ],
)
def test_a_wrong_call_is_explained(module, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        command(*arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_function_takes_bounded_ops_too():
    exact, bounded = compare_candidate("rms_norm", lambda x, weight, *, eps: eager.rms_norm(x, weight, eps), cases=8)
    assert not exact
    assert {row.op for row in bounded} == {"rms_norm float32", "rms_norm bfloat16"}
    assert parity_ok(exact, bounded)

    def without_eps(x, weight, *, eps):
        return eager.rms_norm(x + 0.01, weight, eps)

    assert not parity_ok(*compare_candidate("rms_norm", without_eps, cases=8))


def test_against_another_backend_every_op_is_bitwise():
    same = lambda gate, up: eager.swiglu(gate, up)  # noqa: E731
    exact, bounded = compare_candidate("swiglu", same, cases=4, against="torch eager")
    assert parity_ok(exact, bounded)
    assert not bounded
    assert [row.bound for row in exact] == [None]
    other = lambda gate, up: (gate.float() * torch.sigmoid(gate.float()) * up.float() * (1 + 2**-12)).to(gate.dtype)  # noqa: E731
    assert not parity_ok(*compare_candidate("swiglu", other, cases=4, against="torch eager"))


def test_an_unknown_op_is_named():
    with pytest.raises(ValueError, match="unknown op 'softmax'"):
        compare_candidate("softmax", lambda x: x)
    with pytest.raises(ValueError, match="device is 'gpu', expected 'cpu' or 'cuda'"):
        compare_candidate("linear", lambda x: x, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU here"):
            compare_candidate("linear", lambda x: x, device="cuda")
