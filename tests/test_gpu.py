"""What only a GPU can show: streams, donation of viewed buffers, CUDA graphs, compiled kernels in the whole step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jdspark import Geometry, StepOptions, init_state, make_decode_step
from jdspark.bench.bookkeeping import copies_of
from jdspark.presets import SMALL_K3, random_drafter
from torch_bridge import BridgeError, compare, donating, shares_memory, to_jax, to_torch, twin
from torch_bridge.whole_step import ScriptedTarget, compare_steps

from .hlo_graph import HOST_OP

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(
    max_batch=5, max_draft_len=7, page_size=32, num_pages=64, max_blocks_per_seq=8, max_ctx=200, offset_divisor=10
)
BACKENDS = ["xla", "pallas", "triton"]


@pytest.fixture(scope="module")
def params():
    return random_drafter(SMALL_K3, 0)


def test_torch_waits_for_a_slow_jax_producer():
    x = jnp.ones((4096, 4096))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ x * 1e-4) + 1, x))
    slow(x).block_until_ready()
    tensor = to_torch(slow(x + 1))
    early = tensor.sum().item()
    torch.cuda.synchronize()
    assert early == tensor.sum().item()
    assert tensor.is_cuda


def test_a_copy_is_complete_before_jax_may_reuse_the_memory():
    """Copies made while torch's stream is busy; the array is dropped at once, and JAX fills new ones of the same size."""
    fill = jax.jit(lambda x: jnp.full((1 << 22,), x))
    for round_number in range(20):
        torch.cuda._sleep(20_000_000)
        copy = to_torch(fill(float(round_number)), copy=True)
        for other in range(3):
            fill(-1.0 - other).block_until_ready()
        assert copy.min().item() == copy.max().item() == round_number


def test_jax_waits_for_a_slow_torch_producer():
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(400_000_000)
    x += 7
    array = to_jax(x)
    assert shares_memory(array, x)
    assert float(array.min()) == 7


def test_donating_a_viewed_buffer_is_explained():
    array = jnp.arange(1024, dtype=jnp.float32)
    view = to_torch(array)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(BridgeError, match="still viewed by a torch tensor"):
        donating(step, array)
    del view
    copy = to_torch(jnp.arange(1024, dtype=jnp.float32), copy=True)
    assert donating(step, jnp.arange(1024, dtype=jnp.float32))[0] == copy[0].item() + 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_steps_against_torch(params, backend, fused):
    """The exact part in every bit, JAX on each backend, the torch twin eager or fused with it."""
    layout = "page_major" if backend == "pallas" else "layer_major"
    options = StepOptions(backend=backend, fused_prologue=fused)
    report = compare_steps(
        SMALL_K3, params, dataclasses.replace(GEOMETRY, layout=layout), num_steps=20, context_steps=(4,), options=options
    )
    failures = {row.op: row.failures[:2] for row in report.exact_rows if row.failures}
    assert not failures
    assert report.agreed, {row.op: (row.worst, row.bound) for row in report.bounded_rows}


@pytest.mark.parametrize("backend", BACKENDS)
def test_switches_change_no_bit(params, backend):
    """All four combinations from the same state, every output and the whole pool."""
    target = ScriptedTarget(SMALL_K3, GEOMETRY, np.random.default_rng(0))
    for slot in (0, 1):
        target.grow(slot, 60)
    inputs = target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, GEOMETRY.dummy_slot])
    results = []
    for fused in (False, True):
        for overlap in (False, True):
            options = StepOptions(
                backend=backend, fused_prologue=fused, overlap_context_projection=overlap, return_draft_logits=True
            )
            step = make_decode_step(SMALL_K3, GEOMETRY, options)
            assert step.explain(params, 3)["prepare_step"].split()[0] == (backend if fused else "xla")
            state = dataclasses.replace(init_state(SMALL_K3, GEOMETRY), ctx_len=jnp.array([30, 9, 0, 0, 0, 0], jnp.int32))
            results.append(step(params, dataclasses.replace(state, pool=state.pool + 0.5), inputs))
    for other in results[1:]:
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            assert compare(ours, theirs)


@pytest.mark.parametrize(("layout", "overlap"), [("layer_major", True), ("page_major", False)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_is_not_copied(params, backend, layout, overlap):
    """It is the donated one, no instruction copies as much, and scratch memory does not grow with it. Nothing waits for the
    host."""
    scratch = set()
    for num_pages in (64, 6400):
        geometry = dataclasses.replace(GEOMETRY, num_pages=num_pages, layout=layout)
        target = ScriptedTarget(SMALL_K3, geometry, np.random.default_rng(0))
        inputs = target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, geometry.dummy_slot])
        abstract = jax.eval_shape(lambda geometry=geometry: init_state(SMALL_K3, geometry))
        options = StepOptions(backend=backend, fused_prologue=True, overlap_context_projection=overlap)
        compiled = make_decode_step(SMALL_K3, geometry, options).lower(params, abstract, inputs).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        scratch.add(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes >= abstract.pool.size * abstract.pool.dtype.itemsize
        assert not copies_of(abstract.pool, text)
        assert not HOST_OP.findall(text)
    assert max(scratch) - min(scratch) < 1 << 20


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize(("fused", "overlap"), [(False, True), (True, False), (True, True)])
def test_the_torch_twin_in_a_cuda_graph(params, fused, overlap, B):
    """Captured once, replayed 20 steps with the state carried: the bits of the steps run eagerly and unfused."""
    geometry = GEOMETRY
    torch_params = twin.as_torch(params)
    start = twin.as_torch(dataclasses.replace(init_state(SMALL_K3, geometry), ctx_len=jnp.array([9, 3, 0, 5, 2, 0], jnp.int32)))
    target = ScriptedTarget(SMALL_K3, geometry, np.random.default_rng(1))
    slots = [*range(B - 1), geometry.dummy_slot] if B > 1 else [0]
    for slot in range(B):
        target.grow(slot, 200)
    steps = [twin.as_torch(target.step_inputs(np.zeros((B, 7), np.int32), slots)) for _ in range(20)]
    options = StepOptions(fused_prologue=fused, overlap_context_projection=overlap)

    def clone(tree):
        return jax.tree.map(lambda leaf: leaf.clone(), tree)

    eager_state, wanted = clone(start), []
    for inputs in steps:
        outputs, eager_state = twin.decode_step(torch_params, eager_state, inputs)
        wanted.append(clone(outputs))

    static_inputs, graph_state = clone(steps[0]), clone(start)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            twin.decode_step(torch_params, clone(start), static_inputs, options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_outputs, _ = twin.decode_step(torch_params, graph_state, static_inputs, options)
    for name in ("pool", "ctx_len", "force_counter"):
        getattr(graph_state, name).copy_(getattr(start, name))
    for inputs, outputs in zip(steps, wanted):
        for static, leaf in zip(jax.tree.leaves(static_inputs), jax.tree.leaves(inputs)):
            static.copy_(leaf)
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(jax.tree.leaves(static_outputs), jax.tree.leaves(outputs), strict=True):
            assert compare(ours, theirs)
    for name in ("pool", "ctx_len"):
        assert compare(getattr(graph_state, name), getattr(eager_state, name)), name
