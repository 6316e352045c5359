"""The MLA drafter's arithmetic: context projection, block forward, heads. Equations in section 6 of the design."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .config import DrafterConfig, Geometry
from .ops import block_attention, context_latents, norm_rope
from .ops.block_placement import BlockPlacement
from .ops.norm_rope import at_positions, rms_norm, rope
from .ops.safety import safe_tokens
from .params import DrafterParams, LayerParams
from .rope import softmax_scale


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`, rounded to the weight's dtype (the barrier keeps XLA from fusing the rounding away)."""
    return jax.lax.optimization_barrier(x.astype(weight.dtype) @ weight.T)


def project_context(
    params: DrafterParams,
    config: DrafterConfig,
    captured: jax.Array,
    positions: jax.Array,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    *,
    backend: str = "xla",
) -> jax.Array:
    """`hidden_norm(fc(captured))` and every layer's latent of it: `[N, T*H_t]`, `[N]` -> `[N, L, D]`."""
    assert params.fc is not None
    assert params.hidden_norm is not None
    projected = rms_norm(linear(captured, params.fc), params.hidden_norm, config.rms_norm_eps)
    return context_latents(
        projected, positions, params.kv_a_proj, params.kv_a_layernorm, rope_cos, rope_sin, eps=config.rms_norm_eps,
        backend=backend,
    )  # fmt: skip


def absorbed_query(layer: LayerParams, config: DrafterConfig, h: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`[B, block, H]` -> `[B, block, heads, D]`: `q_nope @ k_b` beside the rotated `q_rope`."""
    q_a = rms_norm(linear(h, layer.q_a_proj), layer.q_a_layernorm, config.rms_norm_eps)
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    q = linear(q_a, layer.q_b_proj).reshape(*h.shape[:2], config.num_attention_heads, head_dim)
    q_nope, q_rope = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    q_latent = jax.lax.optimization_barrier(jnp.einsum("bthn,hnr->bthr", q_nope, layer.k_b))
    return jnp.concatenate([q_latent, rope(q_rope, cos[:, :, None], sin[:, :, None])], axis=-1)


def mlp(layer: LayerParams, h: jax.Array) -> jax.Array:
    """SwiGLU: `down(silu(gate(h)) * up(h))`, SiLU and product in fp32."""
    gate = linear(h, layer.gate_proj).astype(jnp.float32)
    up = linear(h, layer.up_proj).astype(jnp.float32)
    return linear((jax.nn.silu(gate) * up).astype(h.dtype), layer.down_proj)


Attend = Callable[[int, jax.Array, jax.Array], jax.Array]
"""`attend(layer, query [B, block, heads, D], block latents [B, block, D]) -> [B, block, heads, kv_lora_rank]`."""


def block_layers(
    params: DrafterParams,
    config: DrafterConfig,
    noise: jax.Array,
    query_positions: jax.Array,
    attend: Attend,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    *,
    norm_rope_backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """The drafter's layers over `[B, block_size, H]`, whatever holds the context: `attend` knows (a pool, or in training rows).

    Returns hidden states after the final norm `[B, block_size, H]`, and the block's latents `[L, B, block_size, D]`.
    """
    cos, sin = at_positions(rope_cos, query_positions), at_positions(rope_sin, query_positions)
    h = noise
    latents = []
    for index, layer in enumerate(params.layers):
        x = rms_norm(h, layer.input_layernorm, config.rms_norm_eps)
        query = absorbed_query(layer, config, x, cos, sin)
        compressed = linear(x, params.kv_a_proj[index])
        latent = norm_rope(
            compressed.reshape(-1, 1, config.latent_dim),
            query_positions.reshape(-1),
            params.kv_a_layernorm[index : index + 1],
            rope_cos,
            rope_sin,
            eps=config.rms_norm_eps,
            backend=norm_rope_backend,
        ).reshape(compressed.shape)
        latents.append(latent)
        attended = attend(index, query, latent)
        values = jax.lax.optimization_barrier(jnp.einsum("bthr,hvr->bthv", attended, layer.v_b))
        h = h + linear(values.reshape(*h.shape[:2], -1), layer.o_proj)
        h = h + mlp(layer, rms_norm(h, layer.post_attention_layernorm, config.rms_norm_eps))
    return rms_norm(h, params.norm, config.rms_norm_eps), jnp.stack(latents)


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
    attention_backend: str = "xla",
    norm_rope_backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """One non-causal forward pass over every request's block.

    Args:
        noise: `[B, block_size, H]`.
        query_positions: `[B, block_size]` int32.
        pool: the latent pool; read at `[0, advertised)` of each row of `placement.page_tables`.
        advertised: `[B]` int32.

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
            backend=attention_backend,
        )

    return block_layers(params, config, noise, query_positions, attend, rope_cos, rope_sin, norm_rope_backend=norm_rope_backend)


def draft_slots(config: DrafterConfig, block_hidden: jax.Array, K: int) -> jax.Array:
    """The block slots that carry drafts: `[B, block_size, H]` -> `[B, K, H]`."""
    first = config.first_draft_slot
    return block_hidden[:, first : first + K]


def draft_logits(params: DrafterParams, slot_hidden: jax.Array) -> jax.Array:
    """The target's output head on the draft slots: `[B, K, H]` -> `[B, K, V]` fp32, rounded to the head's dtype first."""
    assert params.lm_head is not None
    return linear(slot_hidden, params.lm_head).astype(jnp.float32)


def confidence_logits(params: DrafterParams, config: DrafterConfig, slot_hidden: jax.Array, previous: jax.Array) -> jax.Array:
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
    return linear(x, params.confidence_proj)[..., 0].astype(jnp.float32) + params.confidence_bias.astype(jnp.float32)
