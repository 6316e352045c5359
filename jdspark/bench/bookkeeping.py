"""Part (a): everything of a step that is neither a product nor attention, on ready-made products."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..config import Geometry
from ..params import Array, DrafterParams
from ..state import Changing, DecodeState, split
from ..step import StepInputs
from .clock import Variant, or_raise
from .scale import Scale, draw_inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ready:
    """One step's operands with the products in place."""

    inputs: StepInputs
    accepted_tokens: Array
    """`[B, K+1]` int32"""
    num_accepted: Array
    """`[B]` int32"""
    compressed: Array
    """`[B*(K+1), L, D]`: the context's stacked `kv_a_proj` product."""
    block_latents: Array
    """`[L, B, block_size, D]`"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights and tables that the bookkeeping reads."""

    embed_tokens: Array
    kv_a_layernorm: Array
    rope_cos: Array
    rope_sin: Array


def draw_ready(rng: np.random.Generator, scale: Scale, geometry: Geometry, B: int) -> Ready:
    """Fresh operands on the device."""
    config, K = scale.config, scale.K
    L, D = config.num_hidden_layers, config.latent_dim

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), scale.dtype)

    inputs = dataclasses.replace(draw_inputs(rng, scale, geometry, B), captured=None)
    accepted_tokens, num_accepted = jax.jit(ops.accept_strict)(inputs.logits, inputs.draft_tokens)
    return Ready(inputs, accepted_tokens, num_accepted, normal(B * (K + 1), L, D), normal(L, B, config.block_width(K), D))


def weights_of(params: DrafterParams, state: DecodeState) -> Weights:
    return Weights(params.embed_tokens, params.kv_a_layernorm, state.rope_cos, state.rope_sin)


def bookkeeping(
    state: Changing, ready: Ready, weights: Weights, scale: Scale, geometry: Geometry, *, backend: str, acceptance: bool
) -> tuple[Changing, tuple[jax.Array, ...]]:
    """One step's bookkeeping, every op on one backend: the next state, and what the drafter's products would read.

    With `acceptance` the target's logits are accepted first and the next tokens put together last; else the accepted tokens
    are operands, as in the source document, whose bookkeeping begins behind the sampler.
    """
    config = scale.config
    accepted_tokens, num_accepted = ready.accepted_tokens, ready.num_accepted
    if acceptance:
        accepted_tokens, num_accepted = ops.accept_strict(ready.inputs.logits, ready.inputs.draft_tokens, backend=backend)
    prepared = ops.prepare_step(
        ready.inputs.encoded_offsets, accepted_tokens, num_accepted, state.ctx_len, ready.inputs.slots,
        pool_idx=geometry.pool_idx, divisor=geometry.offset_divisor, page_size=geometry.page_size,
        block_size=config.block_width(scale.K), max_ctx=geometry.max_ctx, mask_token_id=config.mask_token_id,
        embedding=weights.embed_tokens, backend=backend,
    )  # fmt: skip
    pool, _ = ops.norm_rope_store(
        state.pool, ready.compressed, prepared.prologue.context_positions.reshape(-1), weights.kv_a_layernorm,
        weights.rope_cos, weights.rope_sin, num_accepted, prepared.store_pages, prepared.store_offsets,
        eps=config.rms_norm_eps, layout=geometry.layout, backend=backend,
    )  # fmt: skip
    pool = ops.write_block_latents(pool, ready.block_latents, prepared.placement, layout=geometry.layout, backend=backend)
    read: tuple[jax.Array, ...] = (
        prepared.noise, prepared.prologue.bonus, prepared.prologue.query_positions, prepared.placement.page_tables,
        prepared.advertised,
    )  # fmt: skip
    if acceptance:
        read += (ops.next_tokens(accepted_tokens, num_accepted, ready.inputs.draft_tokens, backend=backend),)
    return Changing(pool, prepared.ctx_len, state.force_counter), read


Body = Callable[[Changing, Ready, Weights], tuple[Changing, tuple[jax.Array, ...]]]


def repeated(body: Body, state: Changing, sets: Sequence[Ready], weights: Weights, passes: int) -> tuple[Changing, Any]:
    """`passes` times over the sets of operands, in one loop: the state at the end and the results of the last pass.

    A barrier ties each step's operands and weights to the lengths that the step before left, so that nothing that depends on
    them alone can be moved out of the loop (index ranges, which depend on nothing, may be); every step's results leave the
    loop's body, so that none can be left out.
    """

    def one_pass(_: Any, carried: tuple[Changing, Any]) -> tuple[Changing, Any]:
        state, _ = carried
        results = []
        for ready in sets:
            ready, of_step, ctx_len = jax.lax.optimization_barrier((ready, weights, state.ctx_len))
            state, read = body(state._replace(ctx_len=ctx_len), ready, of_step)
            results.append(read)
        return state, results

    shapes = jax.eval_shape(lambda: one_pass(0, (state, None)))[1]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, passes, one_pass, (state, empty))


BACKENDS = {"jax xla": "xla", "jax pallas": "pallas", "jax triton": "triton"}


class Carried:
    """A state that timed calls hand on: each donates it and leaves the next one."""

    def __init__(self, state: DecodeState):
        self.state = state


def lowered(scale: Scale, geometry: Geometry, carried: DecodeState, sets: Sequence[Ready], weights: Weights, *,
            backend: str, acceptance: bool) -> Any:  # fmt: skip
    """The looped bookkeeping on one backend, `jax.stages.Lowered`; arrays may be abstract."""
    body = functools.partial(bookkeeping, scale=scale, geometry=geometry, backend=backend, acceptance=acceptance)

    def loop(state: Changing, sets: Sequence[Ready], weights: Weights) -> tuple[Changing, Any]:
        return repeated(body, state, sets, weights, scale.loop)

    return jax.jit(loop, donate_argnums=0).lower(split(carried)[0], sets, weights)


def variant(compiled: Any, scale: Scale, carried: Carried, sets: Sequence[Ready], weights: Weights) -> Variant:
    """A call is one dispatch of the loop on the carried state; `compiled` as `compile_all` has it."""
    compiled = or_raise(compiled)

    def run() -> Any:
        changing, read = compiled(split(carried.state)[0], sets, weights)
        carried.state = dataclasses.replace(carried.state, **changing._asdict())
        return changing.ctx_len, read

    return Variant(run, steps=scale.loop * len(sets), one_dispatch=True, note=copies_pool(compiled, carried.state.pool))


COPY = re.compile(r"= \(?(?P<dtype>\w+)\[(?P<dimensions>[\d,]+)\](?:\S*|[^=]*\)) copy(?:-start)?\(")
"""In HLO; what begins an asynchronous one is a tuple."""

LARGE_POOL = 1 << 28
"""Bytes; a copy of a smaller one costs a GPU little, and the CPU's interpreter makes many."""


def copies_of(array: Any, text: str) -> list[re.Match[str]]:
    """The instructions of an HLO text that copy as many numbers as the array has, in whatever shape and dtype."""
    return [found for found in COPY.finditer(text) if math.prod(map(int, found["dimensions"].split(","))) == array.size]


def copies_pool(compiled: Any, pool: Any) -> str:
    """A note for an executable that copies an array as large as a large pool, in whatever shape; empty if it copies none."""
    pool_bytes = pool.size * pool.dtype.itemsize
    if pool_bytes <= LARGE_POOL:
        return ""
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(pool.dtype.name)
    copied = any(found["dtype"] == dtype for found in copies_of(pool, compiled.as_text() or ""))
    return f"copies the pool, {pool_bytes / 1e9:.1f} GB" if copied else ""
