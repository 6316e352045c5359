"""The jitted step against its torch twin over 20 carried steps, and what the comparison must notice."""

import dataclasses

import pytest

from jdspark import Geometry, StepOptions
from jdspark.presets import SMALL_K3, TINY, random_drafter
from torch_bridge import eager, whole_step
from torch_bridge.whole_step import compare_steps

GEOMETRY = Geometry(
    max_batch=5, max_draft_len=7, page_size=32, num_pages=48, max_blocks_per_seq=8, max_ctx=200, offset_divisor=10
)


def failures(report):
    return {row.op: row.failures[:2] for row in [*report.exact_rows, *report.bounded_rows] if row.failures}


@pytest.mark.parametrize(
    ("config", "dtype", "layout"),
    [
        pytest.param(SMALL_K3, "bfloat16", "layer_major", id="small_k3-bf16-layer_major"),
        pytest.param(SMALL_K3, "bfloat16", "page_major", id="small_k3-bf16-page_major", marks=pytest.mark.long),
        pytest.param(TINY, "float32", "layer_major", id="tiny-fp32-layer_major"),
        pytest.param(TINY, "float32", "page_major", id="tiny-fp32-page_major"),
    ],
)
def test_twenty_steps_with_carried_state(config, dtype, layout):
    geometry = dataclasses.replace(GEOMETRY, layout=layout)
    report = compare_steps(config, random_drafter(config, 0, dtype=dtype), geometry, num_steps=20)
    assert report.agreed, failures(report)
    rows = {row.op: row for row in report.exact_rows}
    assert rows["state: pool"].passed == 20
    assert report.step.compilations == 1
    seen = {n for step in report.accepted for n in step}
    assert seen == set(range(1, 9)), "every accepted length occurs"


def test_mixed_batches(params):
    report = compare_steps(TINY, params, GEOMETRY, num_steps=8, context_steps=(2, 5))
    assert report.agreed, failures(report)
    assert report.step.compilations == 2
    assert report.state.ctx_len[2:4].tolist() == [11, 11]


def test_contexts_that_outrun_max_ctx_and_pages(params):
    geometry = dataclasses.replace(GEOMETRY, page_size=4, max_blocks_per_seq=10, max_ctx=44)
    report = compare_steps(TINY, params, geometry, num_steps=20, prompt_lens=(20, 8))
    assert report.agreed, failures(report)
    assert report.state.ctx_len[:2].tolist() == [44, 44]


@pytest.mark.parametrize("shift_label", [True, False])
def test_dflash_and_forced_acceptance(params, shift_label):
    config = dataclasses.replace(TINY, shift_label=shift_label)
    report = compare_steps(config, params, GEOMETRY, num_steps=5, options=StepOptions(force=2.5))
    assert report.agreed, failures(report)
    assert {n for step in report.accepted for n in step} <= {3, 4}


SWITCHES = pytest.mark.parametrize(
    ("fused", "overlap"), [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.long), (True, True)]
)
BATCHES = pytest.mark.parametrize(("prompt_lens", "dummy_rows"), [((9,), 0), ((9, 5, 12), 1)], ids=["B1", "B4"])
SMALL_PAGES = dataclasses.replace(GEOMETRY, page_size=8, max_blocks_per_seq=28)


@pytest.mark.parametrize(
    ("fused", "overlap", "num_steps"),
    [
        (False, False, 20),
        (False, True, 20),
        (True, True, 6),
        pytest.param(True, True, 20, marks=pytest.mark.long),
        pytest.param(True, False, 20, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("prompt_lens", "dummy_rows"),
    [pytest.param((9,), 0, id="B1", marks=pytest.mark.long), pytest.param((9, 5, 12), 1, id="B4")],
)
def test_switches_over_carried_steps(params, fused, overlap, num_steps, prompt_lens, dummy_rows):
    """On the torch side fused means the Triton kernels, interpreted without a GPU; the JAX side is the plain path there."""
    options = StepOptions(fused_prologue=fused, overlap_context_projection=overlap)
    report = compare_steps(
        TINY, params, SMALL_PAGES, num_steps=num_steps, prompt_lens=prompt_lens, dummy_rows=dummy_rows, options=options
    )
    assert report.agreed, failures(report)


@pytest.mark.long
@BATCHES
@SWITCHES
def test_switches_over_twenty_steps_with_pallas(params, fused, overlap, prompt_lens, dummy_rows):
    options = StepOptions(backend="pallas", fused_prologue=fused, overlap_context_projection=overlap)
    report = compare_steps(
        TINY, params, SMALL_PAGES, num_steps=20, prompt_lens=prompt_lens, dummy_rows=dummy_rows, options=options
    )
    assert report.agreed, failures(report)


@pytest.mark.parametrize("op", ["prepare_step", "store_prepared", "write_block_latents", "noise_block", "next_tokens"])
def test_a_mistake_in_one_fused_kernel_is_noticed(params, monkeypatch, op):
    """Negative controls on the fused path of the twin."""
    from torch_bridge import triton_kernels

    mistakes = {
        "prepare_step": lambda call: lambda *a, **k: call(*a, **k)._replace(store_pages=call(*a, **k).store_pages.roll(1, 1)),
        "store_prepared": lambda call: lambda pool, *a, **k: pool,
        "noise_block": lambda call: lambda e, b, **k: call(e, b, **(k | {"mask_token_id": 0})),
    }
    original = getattr(triton_kernels, op)
    monkeypatch.setattr(triton_kernels, op, (mistakes.get(op) or MISTAKES[op])(original))
    report = compare_steps(TINY, params, SMALL_PAGES, num_steps=2, options=StepOptions(fused_prologue=True))
    assert not report.agreed


MISTAKES = {
    "refresh_block_tables": lambda op: lambda *a, **k: (op(*a, **k)[0].roll(1, dims=1), op(*a, **k)[1]),
    "gen_prologue": lambda op: lambda *a, **k: op(*a, **k)._replace(bonus=a[0][:, 0].long()),
    "store_gen_context": lambda op: lambda pool, *a, **k: pool,
    "advance_ctx_len": lambda op: lambda c, s, n, *a, **k: op(c, s, n - 1, *a, **k),
    "block_placement": lambda op: lambda a, *b, **k: op(a + 1, *b, **k),
    "write_block_latents": lambda op: lambda pool, x, *a, **k: op(pool, x.flip(0), *a, **k),
    "accept_strict": lambda op: lambda *a, **k: (op(*a, **k)[0], op(*a, **k)[1].clamp(max=2)),
    "next_tokens": lambda op: lambda a, n, d: op(a, n - 1, d),
    "norm_rope": lambda op: lambda x, p, *a, **k: op(x, p + 1, *a, **k),
    "block_attention": lambda op: lambda *a, **k: op(*a, **(k | {"scale": k["scale"] * 1.2})),
    "markov_chain": lambda op: lambda base, anchor, w1, w2: op(base, anchor, w2, w1),
    "noise_block": lambda op: lambda e, b, **k: op(e, b, **(k | {"mask_token_id": 0})),
}


@pytest.mark.parametrize("op", MISTAKES)
def test_a_mistake_in_one_op_of_the_twin_is_noticed(params, monkeypatch, op):
    """Negative controls: one changed op on the torch side, and some row of the report turns red."""
    monkeypatch.setattr(eager, op, MISTAKES[op](getattr(eager, op)))
    report = compare_steps(TINY, params, GEOMETRY, num_steps=2)
    assert not report.agreed


def test_a_stale_state_is_noticed(params, monkeypatch):
    """The carried comparison must carry: a twin that forgets its pool between steps is caught."""
    original = whole_step.twin.decode_step

    def forgetful(torch_params, state, inputs, options, given=None):
        fresh = dataclasses.replace(state, pool=state.pool.clone())
        outputs, _ = original(torch_params, fresh, inputs, options, given=given)
        return outputs, state

    monkeypatch.setattr(whole_step.twin, "decode_step", forgetful)
    report = compare_steps(TINY, params, GEOMETRY, num_steps=2)
    assert "state: pool" in failures(report)
