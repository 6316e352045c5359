"""Which backend each op of a step runs on, and whether it says why."""

import dataclasses
import functools
import logging
import runpy
from pathlib import Path as FilePath

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import StepOptions, init_state, make_decode_step, paths, store_prefill_context
from jdspark.drafter import ProductShape, project_context
from jdspark.ops import backends
from jdspark.ops.backends import has_kernel
from jdspark.ops.block_attention import AttentionShape
from jdspark.paths import FUSED_PROLOGUE_OPS, INEXACT_OPS, STEP_OPS, Path, choose_path, fastest, measured_times, step_paths
from jdspark.presets import TINY
from pallas_kernels import markov_chain
from torch_bridge import compare
from torch_bridge.cases import BOUNDED_OPS, EXACT_OPS
from torch_bridge.whole_step import ScriptedTarget, compare_steps, stored_latents

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="pins what happens on a CPU")


def test_every_kernel_was_timed_at_every_shape():
    time_ops = runpy.run_path(str(FilePath(__file__).parent.parent / "scripts" / "time_ops.py"))
    # the attention has a benchmark of its own, and no choice of `auto` depends on it
    with_kernel = {op for op in [*EXACT_OPS, *BOUNDED_OPS] if has_kernel(op, "pallas")} - {"block_attention"}
    assert set(time_ops["TIMED_OPS"]) == with_kernel >= set(STEP_OPS) - (set(INEXACT_OPS) - {"norm_rope", "markov_chain"})
    shapes = {(shape.B, shape.max_blocks, shape.num_contexts) for shape in time_ops["TIMED_SHAPES"]}
    table = measured_times()
    assert set(table) == with_kernel
    for op, rows in table.items():
        assert sorted((row["B"], row["columns"], row["contexts"]) for row in rows) == sorted(shapes), op
        for row in rows:
            assert set(row["launches"]) == {"xla", "pallas", "triton"}, op
            assert all(row[backend] > 0 and count >= 1 for backend, count in row["launches"].items()), op


def test_the_measured_table_decides():
    table = measured_times()
    for op, rows in table.items():
        for B in (1, 4, 32):
            slower = [row for row in rows if row["B"] == B and row["pallas"] >= row["xla"]]
            assert (fastest(op, B).backend == "xla") == bool(slower), op
    assert fastest("prepare_step", 1) == Path("pallas")
    assert fastest("next_tokens", 2).why.startswith("Pallas is not faster: ")
    assert fastest("noise_block", 1).backend == "xla"
    assert fastest("noise_block", 2) == fastest("noise_block", 4) == Path("pallas")
    assert fastest("noise_block", 500) == fastest("noise_block", 32)
    assert fastest("block_attention", 1) == Path("xla", "no Pallas kernel was measured")


def test_auto_is_plain_until_the_switch_is_on(monkeypatch, params):
    options = StepOptions(fused_prologue=True)
    assert {path.backend for path in step_paths(params, options, 4).values()} == {"xla"}
    assert str(step_paths(params, options, 4)["accept_strict"]) == "xla (no GPU: JAX runs on cpu)"
    monkeypatch.setattr(paths.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(paths, "why_unavailable", lambda backend: None)
    assert {str(path) for path in step_paths(params, StepOptions(), 4).values()} == {"xla (fused_prologue is off)"}
    chosen = step_paths(params, options, 4)
    exact = [op for op in STEP_OPS if op not in INEXACT_OPS]
    assert {op: chosen[op].backend for op in exact} == {op: fastest(op, 4).backend for op in exact}
    assert {chosen[op].backend for op in INEXACT_OPS} == {"xla"}, "a switch changes no bit"
    explicit = step_paths(params, StepOptions(backend="pallas"), 4)
    assert {op for op, path in explicit.items() if path.why == "fused_prologue is off"} == set(FUSED_PROLOGUE_OPS)
    assert explicit["norm_rope"] == Path("pallas")
    monkeypatch.setattr(paths, "why_unavailable", lambda backend: "this GPU has 8.0")
    assert chosen["prepare_step"] == Path("pallas")
    assert step_paths(params, options, 4)["prepare_step"] == Path("xla", "not pallas: this GPU has 8.0")


def test_an_older_gpu_is_named(monkeypatch):
    class Ampere:
        compute_capability = "8.0"

    monkeypatch.setattr(backends.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backends.jax, "devices", lambda: [Ampere()])
    assert (
        backends.why_unavailable("pallas") == "the kernels are for compute capability 9.0 (Hopper) and newer, this GPU has 8.0"
    )


def test_a_newer_gpu_goes_without_the_kernels_of_hoppers_tensor_cores(monkeypatch):
    class Blackwell:
        compute_capability = "10.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Blackwell()])
    options = StepOptions(backend="pallas", fused_prologue=True)
    attention = AttentionShape(B=1, block_size=7, width=576, kv_lora_rank=512, page_size=32, dtypes=("bfloat16",))
    head = ProductShape(7, (("lm_head", 20480, 7168),), ("bfloat16",))
    paths = {
        op: choose_path(op, options, B=1, embedding_dtype=jnp.bfloat16, shape=shape)
        for op, shape in (("block_attention", attention), ("draft_logits", head), ("prepare_step", None), ("norm_rope", None))
    }
    unknown = choose_path("draft_logits", options, B=1, embedding_dtype=jnp.bfloat16)
    assert unknown == Path("xla", "not pallas: the shapes of its weights are not known")
    why = "not pallas: its kernels need Hopper's tensor cores (compute capability 9), this GPU has 10.0"
    assert paths["block_attention"] == paths["draft_logits"] == Path("xla", why)
    assert paths["prepare_step"] == paths["norm_rope"] == Path("pallas")
    w2 = jax.ShapeDtypeStruct((20480, 256), jnp.bfloat16)
    assert not markov_chain.fits_one_launch(1, w2, 132)
    monkeypatch.setattr(Blackwell, "compute_capability", "9.0")
    assert choose_path("draft_logits", options, B=1, embedding_dtype=jnp.bfloat16, shape=head) == Path("pallas")
    assert markov_chain.fits_one_launch(1, w2, 132)


def test_a_mask_row_of_another_dtype_stays_plain():
    options = StepOptions(backend="pallas", fused_prologue=True)
    same = choose_path("prepare_step", options, B=1, embedding_dtype=jnp.bfloat16, mask_row_dtype=jnp.dtype(jnp.bfloat16))
    other = choose_path("prepare_step", options, B=1, embedding_dtype=jnp.bfloat16, mask_row_dtype=jnp.dtype(jnp.float32))
    assert same == Path("pallas")
    assert other == Path("xla", "not pallas: the trained mask row is float32, the embedding bfloat16")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_prefill_and_project_context_have_one_arithmetic(params, geometry, backend):
    """The same tokens through the prompt store and through project_context on the backend's single ops: equal bits."""
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    target.grow(0, 30)
    chunk = target.prompt(0, 0, 16)
    state = init_state(TINY, geometry, dtype=jnp.float32)
    project = jax.jit(functools.partial(project_context, backends=backends.FloatBackends.of(backend)), static_argnums=1)
    operands = (chunk["captured"], chunk["positions"], state.rope_cos, state.rope_sin)
    wanted = project(params, TINY, *operands)
    state = store_prefill_context(params, init_state(TINY, geometry, dtype=jnp.float32), **chunk, backend=backend)
    assert compare(stored_latents(state, chunk["encoded_offsets"], chunk["positions"]), wanted)


def test_explain_and_the_log_say_why(params, geometry, caplog):
    paths._log_once.cache_clear()
    step = make_decode_step(TINY, geometry, StepOptions(backend="xla", fused_prologue=True))
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((1, 7), np.int32), [0])
    with caplog.at_level(logging.WARNING, "jdspark"):
        for _ in range(2):
            step(params, init_state(TINY, geometry, dtype=jnp.float32), inputs)
    assert caplog.text.count("fused_prologue is on, but prepare_step runs on the plain path: backend is 'xla'") == 1
    explained = make_decode_step(TINY, geometry, StepOptions(backend="pallas", fused_prologue=True)).explain(params, 1)
    assert list(explained) == list(STEP_OPS)
    assert explained["prepare_step"] == "pallas"
    assert explained["block_attention"].startswith("xla (not pallas: off a GPU its warpgroups run as threads")
    assert explained["compress_context"].startswith("xla (not pallas: off a GPU its copies and products")
    without = dataclasses.replace(params, fc=None, hidden_norm=None, lm_head=None)
    explained = make_decode_step(TINY, geometry, StepOptions(backend="pallas", fused_prologue=True)).explain(without, 1)
    assert explained["compress_context"] == "xla (the drafter has no fc)"
    assert explained["draft_logits"] == "xla (there is no lm_head)"


@pytest.mark.parametrize(
    ("layout", "prompt_lens", "num_steps"),
    [
        ("layer_major", (5,), 2),
        pytest.param("layer_major", (9, 5), 3, marks=pytest.mark.long),
        pytest.param("page_major", (9, 5), 3, marks=pytest.mark.long),
    ],
)
def test_fused_kernels_in_the_whole_step(params, geometry, layout, prompt_lens, num_steps):
    """Pallas (interpreted) on JAX's side, Triton (interpreted) on torch's: every bit of the carried steps."""
    options = StepOptions(backend="pallas", fused_prologue=True)
    geometry = dataclasses.replace(geometry, layout=layout)
    report = compare_steps(TINY, params, geometry, num_steps=num_steps, prompt_lens=prompt_lens, options=options)
    assert report.agreed, {row.op: row.failures[:1] for row in [*report.exact_rows, *report.bounded_rows] if row.failures}


@pytest.mark.long
def test_fused_and_plain_give_the_same_bits(params, geometry):
    target = ScriptedTarget(TINY, geometry, np.random.default_rng(0))
    target.grow(0, 30)
    inputs = target.step_inputs(np.zeros((2, 7), np.int32), [0, geometry.dummy_slot])
    results = []
    for fused in (False, True):
        state = init_state(TINY, geometry, dtype=jnp.float32)
        state = dataclasses.replace(state, pool=state.pool + 0.5, ctx_len=jnp.array([9, 0, 0, 0, 0], jnp.int32))
        options = StepOptions(backend="pallas", fused_prologue=fused, return_draft_logits=True)
        results.append(make_decode_step(TINY, geometry, options)(params, state, inputs))
    for ours, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert compare(ours, theirs)
