"""The MLA drafter's arithmetic: context projection, block forward, heads. Equations in section 6 of the design."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .config import DrafterConfig, Geometry
from .ops import block_attention, head_product, linear, norm_rope, rms_norm, rope, swiglu
from .ops.backends import ALL_XLA, FloatBackends, kernel
from .ops.block_placement import BlockPlacement
from .ops.context_latents import stacked_product
from .ops.rope import at_positions
from .ops.safety import safe_tokens
from .params import DrafterParams, LayerParams
from .rope import softmax_scale


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """What decides whether kernels can run a product of a few rows; all of it is static."""

    rows: int
    weights: tuple[tuple[str, int, int], ...]
    """Name, rows and columns of each matrix `[N, K]`."""
    dtypes: tuple[str, ...]
    """Of the matrices, each once."""


def compress_context(
    params: DrafterParams, config: DrafterConfig, captured: jax.Array, *, backends: FloatBackends = ALL_XLA
) -> jax.Array:
    """`hidden_norm(fc(captured))` times every layer's `kv_a_proj`, before norm and rope: `[N, T*H_t]` -> `[N, L, D]`.

    It reads the captured hidden states and weights, nothing that a step's acceptance decides.
    """
    assert params.fc is not None
    assert params.hidden_norm is not None
    if backends.compress_context == "pallas":
        return kernel("compress_context", "pallas")(params, config, captured)
    projected = linear(captured, params.fc, backend=backends.linear)
    projected = rms_norm(projected, params.hidden_norm, config.rms_norm_eps, backend=backends.rms_norm)
    return stacked_product(projected, params.kv_a_proj, backend=backends.linear)


def project_context(
    params: DrafterParams,
    config: DrafterConfig,
    captured: jax.Array,
    positions: jax.Array,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    *,
    backends: FloatBackends = ALL_XLA,
) -> jax.Array:
    """`compress_context`, then norm and rope: every layer's latent, `[N, T*H_t]`, `[N]` -> `[N, L, D]`."""
    compressed = compress_context(params, config, captured, backends=backends)
    return norm_rope(
        compressed, positions, params.kv_a_layernorm, rope_cos, rope_sin, eps=config.rms_norm_eps, backend=backends.norm_rope
    )


def absorbed_query(
    layer: LayerParams,
    config: DrafterConfig,
    h: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    backends: FloatBackends = ALL_XLA,
) -> jax.Array:
    """`[B, block, H]` -> `[B, block, heads, D]`: `q_nope @ k_b` beside the rotated `q_rope`."""
    q_a = linear(h, layer.q_a_proj, backend=backends.linear)
    q_a = rms_norm(q_a, layer.q_a_layernorm, config.rms_norm_eps, backend=backends.rms_norm)
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    q = linear(q_a, layer.q_b_proj, backend=backends.linear).reshape(*h.shape[:2], config.num_attention_heads, head_dim)
    q_nope, q_rope = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    q_latent = head_product(q_nope, layer.k_b, backend=backends.head_product)
    return jnp.concatenate([q_latent, rope(q_rope, cos[:, :, None], sin[:, :, None], backend=backends.rope)], axis=-1)


def mlp(layer: LayerParams, h: jax.Array, *, residual: jax.Array | None = None, backends: FloatBackends = ALL_XLA) -> jax.Array:
    """SwiGLU: `down(silu(gate(h)) * up(h))`, SiLU and product in fp32; `residual +` that."""
    gate = linear(h, layer.gate_proj, backend=backends.linear)
    up = linear(h, layer.up_proj, backend=backends.linear)
    activated = swiglu(gate, up, backend=backends.swiglu)
    return linear(activated, layer.down_proj, residual=residual, backend=backends.linear)


Attend = Callable[[int, jax.Array, jax.Array], jax.Array]
"""`attend(layer, query [B, block, heads, D], block latents [B, block, D]) -> [B, block, heads, kv_lora_rank]`."""


@dataclasses.dataclass(frozen=True)
class LayersShape:
    """What decides whether kernels can run `block_layers`; all of it is static."""

    config: DrafterConfig
    rows: int
    """`B * block_size`."""
    dtypes: tuple[str, ...]
    """Of the embedding and of the layers' matrices, each once."""


def block_layers(
    params: DrafterParams,
    config: DrafterConfig,
    noise: jax.Array,
    query_positions: jax.Array,
    attend: Attend,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    *,
    backends: FloatBackends = ALL_XLA,
) -> tuple[jax.Array, jax.Array]:
    """The drafter's layers over `[B, block_size, H]`, whatever holds the context: `attend` knows (a pool, or in training rows).

    Returns hidden states after the final norm `[B, block_size, H]`, and the block's latents `[L, B, block_size, D]`.
    """
    if backends.block_layers == "pallas":
        in_kernels = kernel("block_layers", "pallas")
        return in_kernels(params, config, noise, query_positions, attend, rope_cos, rope_sin)

    cos, sin = at_positions(rope_cos, query_positions), at_positions(rope_sin, query_positions)
    eps = config.rms_norm_eps
    h = noise
    latents = []
    for index, layer in enumerate(params.layers):
        x = rms_norm(h, layer.input_layernorm, eps, backend=backends.rms_norm)
        query = absorbed_query(layer, config, x, cos, sin, backends=backends)
        compressed = linear(x, params.kv_a_proj[index], backend=backends.linear)
        latent = norm_rope(
            compressed.reshape(-1, 1, config.latent_dim),
            query_positions.reshape(-1),
            params.kv_a_layernorm[index : index + 1],
            rope_cos,
            rope_sin,
            eps=eps,
            backend=backends.norm_rope,
        ).reshape(compressed.shape)
        latents.append(latent)
        attended = attend(index, query, latent)
        values = head_product(attended, layer.v_b, transposed=True, backend=backends.head_product)
        h = linear(values.reshape(*h.shape[:2], -1), layer.o_proj, residual=h, backend=backends.linear)
        x = rms_norm(h, layer.post_attention_layernorm, eps, backend=backends.rms_norm)
        h = mlp(layer, x, residual=h, backends=backends)
    return rms_norm(h, params.norm, eps, backend=backends.rms_norm), jnp.stack(latents)


def draft_block(
    params: DrafterParams,
    config: DrafterConfig,
    geometry: Geometry,
    noise: jax.Array,
    query_positions: jax.Array,
    pool: jax.Array,
    placement: BlockPlacement,
    advertised: jax.Array,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    *,
    backends: FloatBackends = ALL_XLA,
) -> tuple[jax.Array, jax.Array]:
    """One non-causal forward pass over every request's block.

    Args:
        noise: `[B, block_size, H]`.
        query_positions: `[B, block_size]` int32.
        pool: the latent pool; read at `[0, advertised)` of each row of `placement.page_tables`.
        advertised: `[B]` int32.
        backends: of each op.

    Returns:
        hidden states after the final norm `[B, block_size, H]`, and the block's latents `[L, B, block_size, D]`.
    """

    def attend(layer: int, query: jax.Array, block_latents: jax.Array) -> jax.Array:
        return block_attention(
            query,
            block_latents,
            pool,
            placement.page_tables,
            advertised,
            layer=layer,
            scale=softmax_scale(config),
            kv_lora_rank=config.kv_lora_rank,
            layout=geometry.layout,
            backend=backends.block_attention,
        )

    return block_layers(params, config, noise, query_positions, attend, rope_cos, rope_sin, backends=backends)


def draft_slots(config: DrafterConfig, block_hidden: jax.Array, K: int) -> jax.Array:
    """The block slots that carry drafts: `[B, block_size, H]` -> `[B, K, H]`."""
    first = config.first_draft_slot
    return block_hidden[:, first : first + K]


def draft_logits(params: DrafterParams, slot_hidden: jax.Array, *, backends: FloatBackends = ALL_XLA) -> jax.Array:
    """The target's output head on the draft slots: `[B, K, H]` -> `[B, K, V]` fp32, rounded to the head's dtype first."""
    assert params.lm_head is not None
    if backends.draft_logits == "pallas":
        return kernel("draft_logits", "pallas")(params, slot_hidden)
    return linear(slot_hidden, params.lm_head, backend=backends.linear).astype(jnp.float32)


def confidence_logits(
    params: DrafterParams,
    config: DrafterConfig,
    slot_hidden: jax.Array,
    previous: jax.Array,
    *,
    backends: FloatBackends = ALL_XLA,
) -> jax.Array:
    """The confidence head: `[B, K, H]` and the token before each slot `[B, K]` -> `[B, K]` fp32 logits.

    With `confidence_head_with_markov` its input is the slot's hidden state beside the Markov embedding of that token.
    """
    assert params.confidence_proj is not None
    assert params.confidence_bias is not None
    x = slot_hidden
    if config.confidence_head_with_markov:
        assert params.markov_w1 is not None
        embedded = params.markov_w1[safe_tokens(previous, params.markov_w1.shape[0])]
        x = jnp.concatenate([x, embedded.astype(x.dtype)], axis=-1)
    product = linear(x, params.confidence_proj, backend=backends.linear)
    return product[..., 0].astype(jnp.float32) + params.confidence_bias.astype(jnp.float32)
