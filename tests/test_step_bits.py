"""The step whose floating-point ops have one source, in JAX and in torch, compared bit for bit: in Triton's interpreter."""

import jax
import pytest

from jdspark import BackendUnavailable, Geometry, StepOptions, make_decode_step
from jdspark.ops.backends import FloatBackends
from jdspark.presets import TINY
from torch_bridge.whole_step import compare_step_bits

from .interpreted import interpreted_triton  # noqa: F401
from .mistakes import MISTAKES

GEOMETRY = Geometry(max_batch=4, max_draft_len=3, page_size=4, num_pages=24, max_blocks_per_seq=8, max_ctx=28)
OPTIONS = StepOptions(backend="xla", float_backend="triton")
RUN = {"graph": False, "num_steps": 2, "prompt_lens": (5,), "dummy_rows": 1}


@pytest.mark.usefixtures("interpreted_triton")
@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_steps(params, fused):
    """Both switches off, both on. Also where the fast step's counts come from: equal inputs, another arithmetic, the same
    exact part."""
    options = StepOptions(backend="xla", float_backend="triton", fused_prologue=fused, overlap_context_projection=fused)
    report = compare_step_bits(
        TINY, params, GEOMETRY, options=options, fast_options={"xla": StepOptions(backend="xla")}, context_steps=(1,), **RUN
    )
    assert report.agreed, {row.op: row.failures[:1] for row in report.rows if row.failures}
    compared = {row.op: row.cases for row in report.rows if row.backends == ("jax", "torch")}
    floats = {"context_latents", "block_latents", "block_hidden", "base_logits", "draft_logits"}
    state = {"state: pool", "state: ctx_len", "state: force_counter"}
    exact = {"accepted_tokens", "num_accepted", "draft_tokens", "next_tokens", "kv_rewind", "target_seq_lens", "advertised"}
    assert compared == dict.fromkeys(floats | state | exact, 2)
    assert list(report.fast) == ["xla"]
    fast = report.fast["xla"]
    assert fast["accepted_tokens"][0] == fast["advertised"][0] == 0
    differ, total = fast["block_hidden"]
    assert total == 2 * 2 * 3 * TINY.hidden_size
    assert 0 < differ <= total
    assert report.state.ctx_len[1] == 11
    explained = report.step.explain(params, 2)
    assert {explained[op] for op in (*FloatBackends._fields, "markov_chain")} == {"triton"}
    assert explained["prepare_step"].startswith("xla")


@pytest.mark.usefixtures("interpreted_triton")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(params, monkeypatch, name):
    make, where = MISTAKES[name]
    make(monkeypatch)
    steps = {"num_steps": 4 if name == "stale_page_table" else 1}
    report = compare_step_bits(TINY, params, GEOMETRY, options=OPTIONS, **RUN | steps)
    assert where in {row.op for row in report.rows if row.failures}


def test_one_source_is_asked_for(params):
    with pytest.raises(ValueError, match="must have one source"):
        compare_step_bits(TINY, params, GEOMETRY, options=StepOptions(backend="xla"))


def test_an_unknown_float_backend_is_named():
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        StepOptions(float_backend="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it is there")
def test_a_float_backend_that_is_not_there_is_named():
    with pytest.raises(BackendUnavailable, match="float_backend='triton' is not available: Triton kernels inside JAX need"):
        make_decode_step(TINY, GEOMETRY, OPTIONS)
