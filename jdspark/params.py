"""The drafter's weights as a pytree, in the orientation of the checkpoint: `y = x @ w.T`."""

from __future__ import annotations

import dataclasses

import jax

from .ops.checks import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """One decoder layer, without its part of the stacked `kv_a_proj`."""

    input_layernorm: Array
    """`[H]`"""
    q_a_proj: Array
    """`[q_lora_rank, H]`"""
    q_a_layernorm: Array
    """`[q_lora_rank]`"""
    q_b_proj: Array
    """`[heads * (nope + rope), q_lora_rank]`"""
    k_b: Array
    """`[heads, nope, kv_lora_rank]`: the K part of `kv_b_proj`, absorbed into the query."""
    v_b: Array
    """`[heads, v_head_dim, kv_lora_rank]`: its V part, applied to the attention's output."""
    o_proj: Array
    """`[H, heads * v_head_dim]`"""
    post_attention_layernorm: Array
    """`[H]`"""
    gate_proj: Array
    """`[intermediate, H]`"""
    up_proj: Array
    """`[intermediate, H]`"""
    down_proj: Array
    """`[H, intermediate]`"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrafterParams:
    """All weights of a drafter, plus the target's `lm_head` once the user has set it."""

    embed_tokens: Array
    """`[V, H]`, the drafter's own."""
    fc: Array | None
    """`[H, num_target_layers * target_hidden_size]`: context projection. None: the context is never stored."""
    hidden_norm: Array | None
    """`[H]`: RMSNorm of the projected context."""
    kv_a_proj: Array
    """`[L, D, H]`: every layer's latent projection, stacked for one GEMM over the context."""
    kv_a_layernorm: Array
    """`[L, kv_lora_rank]`"""
    layers: tuple[LayerParams, ...]
    norm: Array
    """`[H]`: final norm."""
    markov_w1: Array | None = None
    """`[V, markov_rank]`"""
    markov_w2: Array | None = None
    """`[V, markov_rank]`"""
    confidence_proj: Array | None = None
    """`[1, H]`, or `[1, H + markov_rank]` with `confidence_head_with_markov`."""
    confidence_bias: Array | None = None
    """`[1]`"""
    mask_token_embedding: Array | None = None
    """`[H]`: the trained mask row, where the checkpoint ships one."""
    lm_head: Array | None = None
    """`[V, H]`: the target's; not part of a drafter checkpoint."""

    def with_lm_head(self, lm_head: Array) -> DrafterParams:
        """These weights with the target's output head `[V, H]`, which the draft logits need."""
        return dataclasses.replace(self, lm_head=lm_head)
