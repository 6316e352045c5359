"""`overlap_context_projection` where there is no GPU: what XLA is told about the order, and what the step says about it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import StepOptions, init_state, make_decode_step
from jdspark.presets import TINY
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
