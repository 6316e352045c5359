"""`overlap_context_projection` where there is no GPU: what XLA is told about the order, and what the step says about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import StepOptions, init_state, make_decode_step, paths
from jdspark import step as step_module
from jdspark.bench.overlap import time_beside
from jdspark.bench.profile import DeviceEvent
from jdspark.presets import TINY
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget

from .hlo_graph import HloGraph


def projection_behind_acceptance(hlo: str) -> bool:
    """Whether the product with `fc`, the projection's first, depends on the logits."""
    graph = HloGraph(hlo)
    captured, accepted = (graph.behind(graph.parameter(f"inputs_{name}")) for name in ("captured", "logits"))
    first = next(name for name in graph.behind(graph.parameter("params_fc")) if name in captured)
    return first in accepted


def lowered(params, geometry, num_contexts=0, **options):
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((2, 7), np.int32), [0, 1], [2] * num_contexts)
    step = make_decode_step(TINY, geometry, StepOptions(backend="xla", **options))
    return step.lower(params, init_state(TINY, geometry, dtype=jnp.float32), inputs)


@pytest.mark.parametrize(
    ("fused", "overlap", "num_contexts", "beside"),
    [(True, True, 0, True), (True, True, 1, False), (False, True, 0, False), (True, False, 0, False)],
)
def test_the_projection_waits_for_the_acceptance_or_not(params, geometry, fused, overlap, num_contexts, beside):
    """What XLA is given: off, or where the switch is not taken, an edge; on, none. The store depends on both either way."""
    of_step = lowered(params, geometry, num_contexts, fused_prologue=fused, overlap_context_projection=overlap)
    hlo = of_step.compiler_ir("hlo").as_hlo_text()
    assert projection_behind_acceptance(hlo) != beside
    graph = HloGraph(hlo)
    pool = next(name for name in graph.operands[graph.root] if name in graph.behind(graph.parameter("changing_pool")))
    for source in ("inputs_logits", "params_fc", "inputs_captured"):
        assert pool in graph.behind(graph.parameter(source))
    if beside:  # no pass of XLA's adds one
        assert not projection_behind_acceptance(of_step.compile().as_text())


def test_explain_and_the_log_say_what_became_of_the_switch(params, geometry, monkeypatch, caplog):
    def explained(**options):
        return make_decode_step(TINY, geometry, StepOptions(overlap_context_projection=True, **options)).explain(params, 1)

    paths._log_once.cache_clear()
    alone = explained()["overlap_context_projection"]
    assert alone.startswith("not taken: fused_prologue is off, and a projection that no fused store takes")
    assert f"overlap_context_projection is on, but {alone}" in caplog.text
    assert explained(fused_prologue=True)["overlap_context_projection"].startswith("none (JAX runs on ")
    assert "overlap_context_projection" not in make_decode_step(TINY, geometry).explain(params, 1)
    monkeypatch.setattr(paths.jax, "default_backend", lambda: "gpu")
    on = StepOptions(fused_prologue=True, overlap_context_projection=True)
    assert str(paths.overlap_mechanism()).startswith("concurrent command buffers (")
    assert paths.step_compiler_options(on) == {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    assert paths.step_compiler_options(on, num_contexts=1) is None
    assert paths.step_compiler_options(on, stores_context=False) is None
    assert paths.step_compiler_options(StepOptions(fused_prologue=True)) is None


def test_a_step_inside_a_callers_jit_leaves_the_compiler_to_the_caller(params, geometry, monkeypatch):
    """JAX refuses options of a nested jit. The step by itself is compiled with them: a CPU knows the flag."""
    options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    monkeypatch.setattr(paths, "overlap_mechanism", lambda: paths.OverlapMechanism("some", "", options))
    step = make_decode_step(TINY, geometry, StepOptions(fused_prologue=True, overlap_context_projection=True))
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((1, 0), np.int32), [0])
    passed = []
    original = step_module.pinned_jit
    monkeypatch.setattr(step_module, "pinned_jit", lambda *a, **k: passed.append(k["compiler_options"]) or original(*a, **k))

    @jax.jit
    def nested(params, state, inputs):
        return step(params, state, inputs)[0]

    fixed = init_state(TINY, geometry, dtype=jnp.float32)
    # what is no argument is a constant of that jit
    jax.jit(lambda params: step(params, fixed, inputs)[0])(params)
    jax.jit(lambda inputs: step(params, fixed, inputs)[0])(inputs)
    assert set(passed) == {None}
    passed.clear()
    step._jitted.clear()
    ours = nested(params, init_state(TINY, geometry, dtype=jnp.float32), inputs)
    theirs, _ = step(params, init_state(TINY, geometry, dtype=jnp.float32), inputs)
    assert passed == [None, options]
    assert compare(ours.num_accepted, theirs.num_accepted)


def test_time_beside():
    """Kernels `a` run from 0 to 10 and from 20 to 30; `norm` and `gemm` are beside them at once from 21 to 23."""
    kernels = [(0, 10, "a"), (5, 10, "gemm"), (12, 20, "norm"), (20, 10, "a"), (21, 2, "gemm"), (30, 9, "other")]
    events = [DeviceEvent(start, duration, name, False) for start, duration, name in kernels]
    assert time_beside(events, {"a"}) == (5 + 10, {"gemm": 5 + 2, "norm": 10})
