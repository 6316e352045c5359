"""The compiled step outside of its process: exported and read back, and found in the persistent compilation cache."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import StepOptions, init_state, make_decode_step
from jdspark.presets import SMALL_K3, TINY, random_drafter
from jdspark.state import joined, split
from jdspark.step import decode_step
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget

ROOT = Path(__file__).parent.parent


def test_an_exported_step_gives_the_same_bits(params, geometry):
    check_exported(TINY, params, geometry, StepOptions(return_intermediates=True))


@pytest.mark.gpu
def test_an_exported_step_of_pallas_kernels_gives_the_same_bits(geometry):
    """JAX does not promise that another version can run their custom call, so that it asks to be told."""
    options = StepOptions(backend="pallas", fused_prologue=True, return_intermediates=True)
    check_exported(
        SMALL_K3, random_drafter(SMALL_K3, 0), geometry, options,
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )  # fmt: skip


def check_exported(config, params, geometry, options, **export_arguments):
    """Through bytes and back: every output, the pool and the lengths, over three steps; the pool is still donated."""
    target = ScriptedTarget(config, geometry, np.random.default_rng(0))
    target.grow(0, 36 + 8)
    state = init_state(config, geometry, dtype=params.kv_a_proj.dtype)
    state = dataclasses.replace(state, pool=state.pool + state.pool.dtype.type(0.5))
    _, constant = split(state)

    def step_of_arrays(weights, changing, inputs):
        """The step on lists of arrays: the file then needs no class of this package."""
        params, inputs = jax.tree.unflatten(weights_tree, weights), jax.tree.unflatten(inputs_tree, inputs)
        outputs, after = decode_step(params, joined(type(split(state)[0])(*changing), constant), inputs, options)
        return jax.tree.leaves(outputs), list(split(after)[0])

    weights, weights_tree = jax.tree.flatten(params)
    first = target.step_inputs(np.zeros((1, 7), np.int32), [0])
    inputs, inputs_tree = jax.tree.flatten(first)
    exported = jax.export.export(jax.jit(step_of_arrays, donate_argnums=1), **export_arguments)(
        weights, list(split(state)[0]), inputs
    )
    read_back = jax.export.deserialize(exported.serialize())
    call = jax.jit(read_back.call, donate_argnums=1)

    step = make_decode_step(config, geometry, options)
    changing = [jnp.copy(array) for array in split(state)[0]]
    drafts = np.zeros((1, 7), np.int32)
    for _ in range(3):
        batch = target.step_inputs(drafts, [0])
        outputs, state = step(params, state, batch)
        before = changing
        theirs, changing = call(weights, changing, jax.tree.leaves(batch))
        assert before[0].is_deleted(), "the pool was given to the call"
        for ours, other in zip(jax.tree.leaves(outputs), theirs, strict=True):
            assert compare(ours, other)
        for ours, other in zip(split(state)[0], changing, strict=True):
            assert compare(ours, other)
        drafts = np.asarray(outputs.draft_tokens)


SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jdspark import Geometry, StepInputs, init_state, make_decode_step
from jdspark.presets import TINY, random_drafter

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

geometry = Geometry(max_batch=1, max_draft_len=7, page_size=4, num_pages=12, max_blocks_per_seq=12, max_ctx=36)
offsets = np.full((1, 1, 2, 12), -1, np.int32)
offsets[0, 0, 0] = np.arange(12)
inputs = StepInputs(
    logits=np.arange(8 * TINY.vocab_size, dtype=np.float32).reshape(8, -1) % 7,
    draft_tokens=np.zeros((1, 7), np.int32),
    captured=np.ones((8, TINY.captured_size), np.float32),
    encoded_offsets=offsets,
    slots=np.zeros(1, np.int32),
)
params = random_drafter(TINY, 0, dtype="float32")
state = init_state(TINY, geometry, dtype=jnp.float32)
jax.block_until_ready((params, state))
events.clear()
outputs, state = make_decode_step(TINY, geometry)(params, state, inputs)
found = [event.rsplit("/", 1)[1] for event in events if event.startswith("/jax/compilation_cache/cache_")]
print("|".join(found), outputs.draft_tokens.tolist())
"""


def test_a_second_process_finds_the_step_in_the_cache(tmp_path):
    """The first compiles the step and writes it down, the second compiles nothing and gives the same drafts."""

    def run():
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split(" ", 1)

    (first, drafts), (second, again) = run(), run()
    assert first == "cache_misses"
    assert second == "cache_hits"
    assert again == drafts
