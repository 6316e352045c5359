"""The context projection beside the acceptance, on a GPU: the fork's edges, the order in XLA's executable, and the bits."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jdspark import Geometry, StepOptions, init_state, make_decode_step
from jdspark.presets import SMALL_K3, random_drafter
from torch_bridge import compare, forked, twin
from torch_bridge.whole_step import GraphTwin, ScriptedTarget, named_arrays

from .test_overlap import projection_behind_acceptance

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(max_batch=3, max_draft_len=7, page_size=32, num_pages=64, max_blocks_per_seq=8, max_ctx=200)
OFF, ON = (StepOptions(fused_prologue=True, overlap_context_projection=on, return_intermediates=True) for on in (False, True))
LONG = 100_000_000
"""Cycles for which a stream sleeps, some 50 ms: the other stream is long done."""


@pytest.fixture(scope="module")
def params():
    return random_drafter(SMALL_K3, 0)


@pytest.fixture(scope="module")
def batch(params):
    """Params, a state and inputs of torch tensors, and the outputs and the pool that one step makes of them, unoverlapped."""
    target = ScriptedTarget(SMALL_K3, GEOMETRY, np.random.default_rng(0))
    for slot in (0, 1):
        target.grow(slot, 60)
    inputs = twin.as_torch(target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, GEOMETRY.dummy_slot]))
    state = dataclasses.replace(init_state(SMALL_K3, GEOMETRY), ctx_len=jnp.array([30, 9, 0, 0], jnp.int32))
    torch_params, state = twin.as_torch(params), twin.as_torch(state)
    after = clone(state)
    outputs, _ = twin.decode_step(torch_params, after, inputs, OFF)
    return torch_params, state, inputs, {**named_arrays(outputs), "pool": after.pool}


def clone(tree):
    return jax.tree.map(torch.clone, tree)


def slow_compression(monkeypatch):
    """The side stream's result is NaN for a long time, then what it should be."""
    compress_context = twin.compress_context

    def slow(params, state, captured, *args):
        result = params.kv_a_proj.new_full((captured.shape[0], *params.kv_a_proj.shape[:2]), float("nan"))
        torch.cuda._sleep(LONG)
        return result.copy_(compress_context(params, state, captured, *args))

    monkeypatch.setattr(twin, "compress_context", slow)


def late_step(batch, graph=False):
    """The step's outputs and pool, by name; eager, on captured hidden states that are NaN until long after it was launched."""
    torch_params, state, inputs, _ = batch
    after, late = clone(state), clone(inputs)
    if graph:
        run = GraphTwin(torch_params, after, ON)
        run(late)
        after.pool.copy_(state.pool)
        after.ctx_len.copy_(state.ctx_len)
        return {**named_arrays(clone(run(inputs))), "pool": after.pool}
    late.captured.fill_(float("nan"))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    late.captured.copy_(inputs.captured)
    outputs, _ = twin.decode_step(torch_params, after, late, ON)
    return {**named_arrays(outputs), "pool": after.pool}


def without_edge(monkeypatch, number):
    """Leave out the first edge, the fork's, or the second, the join's; with neither 0 nor 1 none."""
    original, calls = forked.wait_behind, iter(range(1 << 30))
    monkeypatch.setattr(forked, "wait_behind", lambda *streams: None if next(calls) % 2 == number else original(*streams))


def differing(ours, theirs):
    return {name for name, array in ours.items() if not compare(array, theirs[name])}


@pytest.mark.parametrize("graph", [False, True])
def test_either_side_may_be_slow(batch, monkeypatch, graph):
    slow_compression(monkeypatch)
    assert not differing(late_step(batch, graph), batch[3])


@pytest.mark.parametrize(("edge", "name"), [(0, "fork"), (1, "join")])
def test_a_missing_edge_is_noticed(batch, monkeypatch, edge, name):
    """Eager: without the fork's edge the projection reads what is not there yet, without the join's the store does."""
    if name == "join":
        slow_compression(monkeypatch)
    without_edge(monkeypatch, edge)
    found = differing(late_step(batch), batch[3])
    torch.cuda.synchronize()
    assert {"context_latents", "pool"} <= found
    assert "accepted_tokens" not in found


SCRIPT = """
import sys
import torch
from torch_bridge import forked

original, calls = forked.wait_behind, iter(range(1 << 30))
missing = int(sys.argv[1])
forked.wait_behind = lambda *streams: None if next(calls) == missing else original(*streams)
x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
forked.side_stream(x.device)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    beside = forked.Forked(lambda: x * 2, x.device)
    here = x + 1
    y = here + beside.join()
graph.replay()
print(y.tolist())
"""


@pytest.mark.parametrize(("edge", "name"), [(0, "fork"), (1, "join"), (2, "none")])
def test_a_graph_with_a_missing_edge_is_refused(edge, name):
    """CUDA itself notices: a join with work outside of the capture, a capture that ends before its fork was joined."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(edge)], capture_output=True, text=True, check=False)
    if name == "none":
        assert done.stdout.strip() == str([4.0] * 8), done.stderr
    else:
        assert done.returncode != 0
        assert "capture" in done.stderr


@pytest.mark.parametrize("backend", ["auto", "xla", "pallas"])
def test_on_and_off_agree_over_100_steps(params, backend):
    """The fast step, whose products are XLA's own choice: every output, latent and pool entry of every step."""
    sides = []
    for options in (OFF, ON):
        target = ScriptedTarget(SMALL_K3, GEOMETRY, np.random.default_rng(1))
        for slot in (0, 1):
            target.grow(slot, 9)
        step = make_decode_step(SMALL_K3, GEOMETRY, dataclasses.replace(options, backend=backend))
        sides.append((target, step, init_state(SMALL_K3, GEOMETRY), np.zeros((3, 7), np.int32)))
    for _ in range(100):
        results = []
        for number, (target, step, state, drafts) in enumerate(sides):
            target.grow_ahead(2, state.ctx_len)
            outputs, state = step(params, state, target.step_inputs(drafts, [0, 1, GEOMETRY.dummy_slot]))
            sides[number] = (target, step, state, np.asarray(outputs.draft_tokens))
            results.append({**named_arrays(outputs), "pool": state.pool, "ctx_len": state.ctx_len})
        assert not differing(*results)


@pytest.mark.parametrize("on", [False, True])
def test_the_executable_has_the_edge_or_not(params, on):
    """JAX 0.11's XLA keeps the barrier's operands in what it hands to the GPU, so that off is ordered there as well; JAX 0.12's
    drops the barrier, and only its schedule orders the two."""
    target = ScriptedTarget(SMALL_K3, GEOMETRY, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, GEOMETRY.dummy_slot])
    step = make_decode_step(SMALL_K3, GEOMETRY, ON if on else OFF)
    compiled = step.lower(params, init_state(SMALL_K3, GEOMETRY), inputs).compile()
    assert projection_behind_acceptance(compiled.as_text()) == (not on and jax.__version_info__ < (0, 12))
