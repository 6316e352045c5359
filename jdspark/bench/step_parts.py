"""Part (c): each part of the step by itself, on operands that are not in the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..config import Geometry
from ..drafter import absorbed_query, compress_context, draft_block, draft_logits, mlp
from ..ops.backends import COMPOSED_OPS, FloatBackends, has_kernel, why_unsupported
from ..ops.context_latents import stacked_product
from ..ops.rope import at_positions
from ..params import DrafterParams
from ..rope import softmax_scale
from ..state import DecodeState
from .clock import Variant, or_raise
from .floors import part_bytes
from .scale import Scale, draw_inputs

PART_OPS: dict[str, tuple[str, ...]] = {
    "accept": ("accept_strict",),
    "prepare": ("prepare_step",),
    "context projection": ("linear", "rms_norm"),
    "context latents": ("linear",),
    "store": ("norm_rope_store",),
    "query": ("rms_norm", "linear", "head_product", "rope"),
    "block latents": ("linear", "norm_rope"),
    "attention": ("block_attention",),
    "attention output": ("head_product", "linear"),
    "mlp": ("rms_norm", "linear", "swiglu"),
    "lm_head": ("rms_norm", "draft_logits", "linear"),
    "markov chain": ("markov_chain",),
    "block write": ("write_block_latents",),
    "next tokens": ("next_tokens",),
    "whole context": ("compress_context", "linear", "rms_norm"),
    "all layers": ("block_layers", "block_attention", "linear", "head_product", "rms_norm", "rope", "norm_rope", "swiglu"),
}
"""The ops of each part, in the step's order. `prepare` makes the noise block, `store` norms and rotates. The last two are
several of the others in one: on Pallas their products are in kernels of a whole op."""


def part_backends(part: str) -> list[str]:
    """XLA, and each backend that has a kernel for one of the part's ops."""
    return ["xla", *(b for b in ("pallas", "triton") if any(has_kernel(op, b) for op in PART_OPS[part]))]


def why_no_part(part: str, backend: str, shapes: Mapping[str, Any]) -> str:
    """Why a backend's kernels do not take these shapes, of `kernel_shapes`; empty if they do."""
    for op in PART_OPS[part]:
        if op in shapes and has_kernel(op, backend) and (reason := why_unsupported(op, backend, shapes[op])):
            return reason
    return ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartOperands:
    """What the parts read, ready-made."""

    params: DrafterParams
    state: DecodeState
    inputs: Any
    accepted_tokens: jax.Array
    num_accepted: jax.Array
    prepared: ops.PreparedStep
    hidden: jax.Array
    """`[L, B, block, H]`: a hidden state for each layer."""
    projected: jax.Array
    """`[B*(K+1), H]`"""
    latents: jax.Array
    """`[B*(K+1), L, D]`, before norm and rope."""
    block_latents: jax.Array
    """`[L, B, block, D]`"""
    query: jax.Array
    """`[L, B, block, heads, D]`"""
    attended: jax.Array
    """`[L, B, block, heads, kv_lora_rank]`"""
    base_logits: jax.Array
    """`[B, K, V]` fp32"""


def _prepare(operands: PartOperands, scale: Scale, geometry: Geometry, backend: str = "xla") -> ops.PreparedStep:
    return ops.prepare_step(
        operands.inputs.encoded_offsets, operands.accepted_tokens, operands.num_accepted, operands.state.ctx_len,
        operands.inputs.slots, pool_idx=geometry.pool_idx, divisor=geometry.offset_divisor, page_size=geometry.page_size,
        block_size=scale.config.block_width(scale.K), max_ctx=geometry.max_ctx, mask_token_id=scale.config.mask_token_id,
        embedding=operands.params.embed_tokens, backend=backend,
    )  # fmt: skip


def draw_part_operands(
    rng: np.random.Generator, scale: Scale, geometry: Geometry, B: int, params: DrafterParams, state: DecodeState
) -> PartOperands:
    """Random operands of every part."""
    config, K = scale.config, scale.K
    L, D, H, heads = config.num_hidden_layers, config.latent_dim, config.hidden_size, config.num_attention_heads
    block = config.block_width(K)

    def normal(*shape: int, dtype: Any = scale.dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    inputs = draw_inputs(rng, scale, geometry, B)
    accepted_tokens, num_accepted = jax.jit(ops.accept_strict)(inputs.logits, inputs.draft_tokens)
    none: Any = None
    operands = PartOperands(
        params, state, inputs, accepted_tokens, num_accepted, none,
        hidden=normal(L, B, block, H), projected=normal(B * (K + 1), H), latents=normal(B * (K + 1), L, D),
        block_latents=normal(L, B, block, D), query=normal(L, B, block, heads, D),
        attended=normal(L, B, block, heads, config.kv_lora_rank), base_logits=normal(B, K, scale.vocab, dtype="float32"),
    )  # fmt: skip
    return dataclasses.replace(operands, prepared=jax.jit(lambda o: _prepare(o, scale, geometry))(operands))


def part_function(part: str, scale: Scale, geometry: Geometry, backend: str) -> Callable[[PartOperands], Any]:
    """`f(operands)` of one part, all layers of it; ops without a kernel for the backend run on XLA.

    The two parts that write into the pool return it: their caller donates it.
    """
    config, eps, K = scale.config, scale.config.rms_norm_eps, scale.K
    composed = {op: backend for op in PART_OPS[part] if op in COMPOSED_OPS and has_kernel(op, backend)}
    floats = FloatBackends.of(backend)._replace(**composed)

    def op_backend(op: str) -> str:
        return backend if backend == "xla" or has_kernel(op, backend) else "xla"

    def per_layer(operands: PartOperands, of_layer: Callable[[int, jax.Array], jax.Array], x: jax.Array) -> list[jax.Array]:
        """A layer's result after the other: a barrier keeps them from becoming one product or one loop."""
        results: list[jax.Array] = []
        for index in range(config.num_hidden_layers):
            of_this = x[index]
            if results:
                of_this, results[-1] = jax.lax.optimization_barrier((of_this, results[-1]))
            results.append(of_layer(index, of_this))
        return results

    def accept(o: PartOperands) -> Any:
        return ops.accept_strict(o.inputs.logits, o.inputs.draft_tokens, backend=op_backend("accept_strict"))

    def prepare(o: PartOperands) -> Any:
        prepared = _prepare(o, scale, geometry, backend)
        # without what the step does not read: in a function of its own it would be copied out
        return prepared._replace(
            block_tables=None, block_counts=None, placement=prepared.placement._replace(upper=None),
            prologue=prepared.prologue._replace(embedding_ids=None),
        )  # fmt: skip

    def context_projection(o: PartOperands) -> Any:
        assert o.params.fc is not None
        assert o.params.hidden_norm is not None
        projected = ops.linear(o.inputs.captured, o.params.fc, backend=floats.linear)
        return ops.rms_norm(projected, o.params.hidden_norm, eps, backend=floats.rms_norm)

    def context_latents(o: PartOperands) -> Any:
        return stacked_product(o.projected, o.params.kv_a_proj, backend=floats.linear)

    def store(o: PartOperands) -> Any:
        pool, _ = ops.norm_rope_store(
            o.state.pool, o.latents, o.prepared.prologue.context_positions.reshape(-1), o.params.kv_a_layernorm,
            o.state.rope_cos, o.state.rope_sin, o.num_accepted, o.prepared.store_pages, o.prepared.store_offsets,
            eps=eps, layout=geometry.layout, backend=backend,
        )  # fmt: skip
        return pool

    def query(o: PartOperands) -> Any:
        positions = o.prepared.prologue.query_positions
        cos, sin = at_positions(o.state.rope_cos, positions), at_positions(o.state.rope_sin, positions)

        def of_layer(index: int, h: jax.Array) -> jax.Array:
            layer = o.params.layers[index]
            x = ops.rms_norm(h, layer.input_layernorm, eps, backend=floats.rms_norm)
            return absorbed_query(layer, config, x, cos, sin, backends=floats)

        return per_layer(o, of_layer, o.hidden)

    def block_latents(o: PartOperands) -> Any:
        positions = o.prepared.prologue.query_positions.reshape(-1)

        def of_layer(index: int, h: jax.Array) -> jax.Array:
            compressed = ops.linear(h, o.params.kv_a_proj[index], backend=floats.linear)
            return ops.norm_rope(
                compressed.reshape(-1, 1, config.latent_dim), positions, o.params.kv_a_layernorm[index : index + 1],
                o.state.rope_cos, o.state.rope_sin, eps=eps, backend=floats.norm_rope,
            )  # fmt: skip

        return per_layer(o, of_layer, o.hidden)

    def attention(o: PartOperands) -> Any:
        def of_layer(index: int, q: jax.Array) -> jax.Array:
            return ops.block_attention(
                q, o.block_latents[index], o.state.pool, o.prepared.placement.page_tables, o.prepared.advertised, layer=index,
                scale=softmax_scale(config), kv_lora_rank=config.kv_lora_rank, layout=geometry.layout,
                backend=floats.block_attention,
            )  # fmt: skip

        return per_layer(o, of_layer, o.query)

    def attention_output(o: PartOperands) -> Any:
        def of_layer(index: int, attended: jax.Array) -> jax.Array:
            layer, h = o.params.layers[index], o.hidden[index]
            values = ops.head_product(attended, layer.v_b, transposed=True, backend=floats.head_product)
            return ops.linear(values.reshape(*h.shape[:2], -1), layer.o_proj, residual=h, backend=floats.linear)

        return per_layer(o, of_layer, o.attended)

    def mlp_part(o: PartOperands) -> Any:
        def of_layer(index: int, h: jax.Array) -> jax.Array:
            layer = o.params.layers[index]
            x = ops.rms_norm(h, layer.post_attention_layernorm, eps, backend=floats.rms_norm)
            return mlp(layer, x, residual=h, backends=floats)

        return per_layer(o, of_layer, o.hidden)

    def lm_head(o: PartOperands) -> Any:
        first = config.first_draft_slot
        x = ops.rms_norm(o.hidden[0], o.params.norm, eps, backend=floats.rms_norm)
        return draft_logits(o.params, x[:, first : first + K], backends=floats)

    def markov_chain(o: PartOperands) -> Any:
        assert o.params.markov_w1 is not None
        assert o.params.markov_w2 is not None
        bonus = o.prepared.prologue.bonus
        return ops.markov_chain(o.base_logits, bonus, o.params.markov_w1, o.params.markov_w2, backend=backend)

    def block_write(o: PartOperands) -> Any:
        return ops.write_block_latents(
            o.state.pool, o.block_latents, o.prepared.placement, layout=geometry.layout, backend=backend
        )

    def next_tokens(o: PartOperands) -> Any:
        return ops.next_tokens(o.accepted_tokens, o.num_accepted, o.inputs.draft_tokens, backend=backend)

    def whole_context(o: PartOperands) -> Any:
        return compress_context(o.params, config, o.inputs.captured, backends=floats)

    def all_layers(o: PartOperands) -> Any:
        return draft_block(
            o.params, config, geometry, o.hidden[0], o.prepared.prologue.query_positions, o.state.pool, o.prepared.placement,
            o.prepared.advertised, o.state.rope_cos, o.state.rope_sin, backends=floats,
        )  # fmt: skip

    return {
        "accept": accept,
        "prepare": prepare,
        "context projection": context_projection,
        "context latents": context_latents,
        "store": store,
        "query": query,
        "block latents": block_latents,
        "attention": attention,
        "attention output": attention_output,
        "mlp": mlp_part,
        "lm_head": lm_head,
        "markov chain": markov_chain,
        "block write": block_write,
        "next tokens": next_tokens,
        "whole context": whole_context,
        "all layers": all_layers,
    }[part]


WRITES_POOL = ("store", "block write")


class PartRun:
    """Runs parts of a step in turn on a few sets of operands that share weights and pool; the pool is handed on."""

    def __init__(self, sets: Sequence[PartOperands]):
        self.pool: Any = sets[0].state.pool
        self.sets = [dataclasses.replace(o, state=dataclasses.replace(o.state, pool=None)) for o in sets]

    def lower(self, part: str, function: Callable[[PartOperands], Any]) -> Any:
        """`jax.stages.Lowered` of `(pool, operands) -> (pool, result)`, the pool donated."""
        return jax.jit(self._with_pool(part, function), donate_argnums=0).lower(self.pool, self.sets[0])

    def variant(self, compiled: Any, flush: Callable[[], Any] | None) -> Variant:
        """A call flushes the cache, if there is a function for it, and then runs the part on the next operands."""
        compiled = or_raise(compiled)
        number = 0

        def run() -> Any:
            nonlocal number
            if flush is not None:
                flush()
            self.pool, result = compiled(self.pool, self.sets[number % len(self.sets)])
            number += 1
            return self.pool, result

        return Variant(run, skip=0 if flush is None else 1)

    @staticmethod
    def _with_pool(part: str, function: Callable[[PartOperands], Any]) -> Callable[[Any, PartOperands], Any]:
        def call(pool: Any, operands: PartOperands) -> Any:
            result = function(dataclasses.replace(operands, state=dataclasses.replace(operands.state, pool=pool)))
            if part in WRITES_POOL:
                return result, None
            return pool, result

        return call


def cache_flush(num_bytes: int) -> Callable[[], Any]:
    """A function that launches one kernel over a buffer of this size, several times the device's cache."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = jnp.zeros(num_bytes // 4, jnp.int32)

    def flush() -> Any:
        nonlocal buffer
        buffer = add(buffer)
        return buffer

    jax.block_until_ready(flush())
    return flush


def bytes_of(scale: Scale, geometry: Geometry, B: int) -> dict[str, Any]:
    """`part_bytes` at this scale's sizes."""
    itemsize = jnp.dtype(scale.dtype).itemsize
    return part_bytes(
        scale.config, B=B, K=scale.K, context=geometry.max_ctx, columns=geometry.max_blocks_per_seq, vocab=scale.vocab,
        itemsize=itemsize,
    )  # fmt: skip
