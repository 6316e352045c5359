"""The drafter's layers with every product in kernels that stream the weights: nine launches a layer, two of them attention's.

Between a layer's parts the rows stay padded, zeros behind the last one. Against the plain definition, sums are as long and as
exact, but RMSNorm multiplies by the row's factor behind the product instead of ahead of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdspark.config import DrafterConfig
from jdspark.drafter import Attend, LayersShape
from jdspark.ops.rms_norm import rms_norm
from jdspark.params import DrafterParams

from .attention_operands import attention_operands, most_nope
from .launch import CORE, TILE, WARPGROUP
from .streamed_product import Stacked, normed_rows, padded, streamed_product, unsupported_rows, whole_rows


def unsupported(shape: LayersShape) -> str | None:
    """None if the kernels can run these layers here, else the reason."""
    config = shape.config
    if reason := unsupported_rows(shape.rows, shape.dtypes):
        return reason
    for name in ("hidden_size", "q_lora_rank", "intermediate_size", "qk_nope_head_dim", "qk_rope_head_dim"):
        if getattr(config, name) % TILE:
            return f"{name} is {getattr(config, name)}, its kernels need a multiple of {TILE}"
    if config.kv_lora_rank % WARPGROUP:
        return f"kv_lora_rank is {config.kv_lora_rank}, its kernels need a multiple of {WARPGROUP}"
    most = most_nope(padded(shape.rows))
    if config.qk_nope_head_dim > most:
        return f"qk_nope_head_dim is {config.qk_nope_head_dim}, with {shape.rows} rows its kernels take up to {most}"
    if config.qk_rope_head_dim >= 2 * WARPGROUP:
        return f"qk_rope_head_dim is {config.qk_rope_head_dim}, its kernels need less than {2 * WARPGROUP}"
    if config.v_head_dim % CORE or config.num_attention_heads * config.v_head_dim % TILE:
        return f"v_head_dim is {config.v_head_dim}, its kernels need a multiple of {CORE}, and of {TILE} over all heads"
    return None


def block_layers(
    params: DrafterParams,
    config: DrafterConfig,
    noise: jax.Array,
    query_positions: jax.Array,
    attend: Attend,
    rope_cos: jax.Array,
    rope_sin: jax.Array,
    **sizes: Any,
) -> tuple[jax.Array, jax.Array]:
    """`jdspark.drafter.block_layers` for a few rows.

    Args:
        sizes: `programs` of `streamed_product`.

    Returns:
        hidden states after the final norm `[B, block, H]`, and the block's latents `[L, B, block, D]`.
    """
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    B, block_size, hidden_size = noise.shape
    num_rows = B * block_size
    rows = padded(num_rows)

    positions = query_positions.reshape(-1)
    h = jnp.pad(noise.reshape(num_rows, hidden_size), ((0, rows - num_rows), (0, 0)))
    normed = normed_rows(h, params.layers[0].input_layernorm)
    latents = []
    for index, layer in enumerate(params.layers):
        q_a, compressed = streamed_product(
            normed, [layer.q_a_proj, Stacked(params.kv_a_proj, index)], eps=eps, next_norms=[layer.q_a_layernorm, None],
            name="query_and_latent", **sizes,
        )  # fmt: skip
        (q,) = streamed_product(q_a.normed, [layer.q_b_proj], eps=eps, name="query_heads", **sizes)
        query, latent = attention_operands(
            q.values, compressed.values, positions, layer.k_b, params.kv_a_layernorm[index], rope_cos, rope_sin, eps=eps
        )
        latent = latent.reshape(B, block_size, config.latent_dim)
        latents.append(latent)
        attended = attend(index, query.reshape(B, block_size, heads, config.latent_dim), latent)
        attended = attended.reshape(num_rows, heads, config.kv_lora_rank)
        (values,) = streamed_product(whole_rows(attended), [layer.v_b], name="attended_values", **sizes)
        (out,) = streamed_product(
            values.values, [layer.o_proj], residual=h, next_norms=[layer.post_attention_layernorm],
            name="attention_output", **sizes,
        )  # fmt: skip
        (activated,) = streamed_product(
            out.normed, [layer.gate_proj, layer.up_proj], eps=eps, gated=True, name="gate_and_up", **sizes
        )
        last = index + 1 == len(params.layers)
        following = None if last else params.layers[index + 1].input_layernorm
        (out,) = streamed_product(
            activated.values, [layer.down_proj], residual=out.values, next_norms=[following], name="down", **sizes
        )
        h, normed = out.values, out.normed
    return rms_norm(h[:num_rows].reshape(noise.shape), params.norm, eps), jnp.stack(latents)
