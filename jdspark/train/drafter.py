"""Training an MLA DSpark drafter on a frozen target's hidden states and distributions.

Per sequence some anchor positions are drawn. The block of an anchor p is the token at p and mask tokens behind it; slot j
predicts the token at p+1+j, reads the context (projected hidden states) at positions below p, and its own whole block. The
Markov bias is that of the true previous token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..byte_lm import MASK, ByteLMConfig, ByteLMParams, causal_forward, logits
from ..checkpoint import assemble_params, required_shapes
from ..config import DrafterConfig, YarnConfig
from ..drafter import block_layers, confidence_logits, draft_logits, project_context
from ..ops import noise_block
from ..params import DrafterParams
from ..rope import softmax_scale, yarn_tables
from .corpus import windows
from .loop import Optimizer, Progress, cast

CROSS_ENTROPY, L1, CONFIDENCE = 0.1, 0.9, 1.0
"""Weights of the loss terms."""
SLOT_DECAY = 4.0
"""Slot j weighs `exp(-j / SLOT_DECAY)`."""


def drafter_for(target: ByteLMConfig, **sizes: int) -> DrafterConfig:
    """An MLA DSpark drafter's config for a byte-level target; `sizes` change the default ones."""
    sizes = {
        "num_hidden_layers": 3, "num_attention_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 512, "markov_rank": 32,
    } | sizes  # fmt: skip
    return DrafterConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        num_target_layers=len(target.target_layer_ids),
        target_hidden_size=target.hidden_size,
        max_position_embeddings=target.max_position_embeddings,
        mask_token_id=MASK,
        rope=YarnConfig(10000.0, 1.0, target.max_position_embeddings),
        target_layer_ids=target.target_layer_ids,
        block_size=7,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        **sizes,  # type: ignore[arg-type]  # all of them integers
    )


def init_drafter(config: DrafterConfig, target: ByteLMParams, seed: int) -> DrafterParams:
    """Random fp32 weights (norms 1, matrices normal with std 0.02, the Markov product and confidence 0 at first)."""
    rng = np.random.default_rng(seed)
    ends_branch = ("o_proj.weight", "down_proj.weight")

    def draw(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        if "norm" in name:
            return jnp.ones(shape, jnp.float32)
        if name.startswith(("markov_w2", "confidence")):
            return jnp.zeros(shape, jnp.float32)
        std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if name.endswith(ends_branch) else 0.02
        return jnp.asarray(std * rng.standard_normal(shape), jnp.float32)

    params = assemble_params(config, {name: draw(name, shape) for name, shape in required_shapes(config).items()})
    return with_target(params, target)


def with_target(params: DrafterParams, target: ByteLMParams) -> DrafterParams:
    """The drafter with the target's own embedding and output head."""
    return dataclasses.replace(params, embed_tokens=target.embed_tokens, lm_head=target.lm_head)


def block_hidden(
    params: DrafterParams,
    config: DrafterConfig,
    tokens: jax.Array,
    captured: jax.Array,
    anchors: jax.Array,
    block_size: int,
) -> jax.Array:
    """Hidden states of every anchor's block, all blocks of a sequence at once.

    The layers and the context projection are the decode step's; only the attention differs, which reads rows instead of
    pages.

    Args:
        tokens: `[S, T]` int32.
        captured: `[S, T, T_l*H_t]`, the target's hidden states at the same positions.
        anchors: `[S, A]` int32 positions.

    Returns:
        `[S, A, block_size, H]`, after the final norm.
    """
    num_sequences, length = tokens.shape
    num_anchors = anchors.shape[1]
    cos, sin = (jnp.asarray(table) for table in yarn_tables(config, length + block_size))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    latents = project_context(params, config, captured.reshape(-1, config.captured_size), positions.reshape(-1), cos, sin)
    context = latents.reshape(num_sequences, length, config.num_hidden_layers, config.latent_dim)
    before_anchor = jnp.arange(length) < anchors[:, :, None]

    def attend(layer: int, query: jax.Array, block: jax.Array) -> jax.Array:
        """`[S*A, block, heads, D]` over the positions below each block's anchor, and the block."""
        query = query.reshape(num_sequences, num_anchors, block_size, *query.shape[2:])
        block = block.reshape(num_sequences, num_anchors, block_size, -1)
        over_context = jnp.einsum("sajhd,skd->sahjk", query, context[:, :, layer], preferred_element_type=jnp.float32)
        over_context = jnp.where(before_anchor[:, :, None, None], over_context, -jnp.inf)
        over_block = jnp.einsum("sajhd,said->sahji", query, block, preferred_element_type=jnp.float32)
        scores = jnp.concatenate([over_context, over_block], axis=-1) * softmax_scale(config)
        weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        rank = config.kv_lora_rank
        output = jnp.einsum("sahjk,skr->sajhr", weights[..., :length], context[:, :, layer, :rank])
        output += jnp.einsum("sahji,sair->sajhr", weights[..., length:], block[..., :rank])
        return output.reshape(-1, *output.shape[2:])

    bonus = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    noise = noise_block(
        params.embed_tokens, bonus, block_size=block_size, mask_token_id=config.mask_token_id,
        mask_row=params.mask_token_embedding,
    )  # fmt: skip
    query_positions = (anchors[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)).reshape(-1, block_size)
    hidden, _ = block_layers(params, config, noise, query_positions, attend, cos, sin)
    return hidden.reshape(num_sequences, num_anchors, block_size, -1)


def drafter_loss(
    params: DrafterParams,
    config: DrafterConfig,
    tokens: jax.Array,
    captured: jax.Array,
    target_logits: jax.Array,
    anchors: jax.Array,
    block_size: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The published recipe: 0.1 cross-entropy + 0.9 L1 distance to the target's distribution + confidence.

    The confidence head learns, per slot, 1 - half that distance: the probability that the target keeps the draft.

    Args:
        tokens: `[S, T]`; the blocks' labels must lie inside: anchors below `T - block_size`.
        target_logits: `[S, T, V]` fp32, of the token after each position.

    Returns:
        the loss, and means over all slots: cross-entropy, the L1 distance, and `acceptance`, an estimate of the tokens per
        step of sampling (1 + the sum over slots of the product of the kept probabilities so far).
    """
    hidden = block_hidden(params, config, tokens, captured, anchors, block_size)
    sequence = jnp.arange(tokens.shape[0])[:, None, None]
    previous_at = anchors[:, :, None] + jnp.arange(block_size)
    previous, labels = tokens[sequence, previous_at], tokens[sequence, previous_at + 1]
    assert params.markov_w1 is not None
    assert params.markov_w2 is not None
    bias = (params.markov_w1[previous] @ params.markov_w2.T).astype(jnp.float32)
    drafted = draft_logits(params, hidden) + bias
    wanted = jax.nn.softmax(target_logits[sequence, previous_at])

    distance = jnp.sum(jnp.abs(jax.nn.softmax(drafted) - wanted), axis=-1)
    kept = 1 - 0.5 * distance
    entropy = optax.softmax_cross_entropy_with_integer_labels(drafted, labels)
    confidence = confidence_logits(
        params, config, hidden.reshape(-1, block_size, config.hidden_size), previous.reshape(-1, block_size)
    ).reshape(kept.shape)
    doubt = optax.sigmoid_binary_cross_entropy(confidence, jax.lax.stop_gradient(kept))
    weight = jnp.exp(-jnp.arange(block_size) / SLOT_DECAY)
    per_slot = CROSS_ENTROPY * entropy + L1 * distance + CONFIDENCE * doubt
    loss = jnp.mean(jnp.sum(per_slot * weight, axis=-1) / jnp.sum(weight))
    metrics = {
        "cross_entropy": jnp.mean(entropy),
        "l1": jnp.mean(distance),
        "acceptance": 1 + jnp.mean(jnp.sum(jnp.cumprod(kept, axis=-1), axis=-1)),
    }
    return loss, metrics


def train_drafter(
    config: DrafterConfig,
    params: DrafterParams,
    target_config: ByteLMConfig,
    target: ByteLMParams,
    tokens: np.ndarray,
    *,
    steps: int,
    batch: int,
    length: int,
    anchors: int,
    block_size: int,
    optimizer: optax.GradientTransformation,
    dtype: str,
    seed: int,
    progress: Progress,
) -> DrafterParams:
    """Train on random windows of `tokens` with `anchors` blocks each; embedding and output head stay the target's.

    The frozen target runs in `dtype`, too. Returns the fp32 weights, with the target's embedding and head in place.
    """
    frozen = cast(target, dtype)

    def loss(trained: DrafterParams, frozen: ByteLMParams, tokens: jax.Array, at: jax.Array) -> tuple[jax.Array, dict]:
        hidden, captured = causal_forward(frozen, target_config, tokens)
        return drafter_loss(
            with_target(cast(trained, dtype), frozen), config, tokens, captured, logits(frozen, hidden), at, block_size
        )

    trained = dataclasses.replace(params, embed_tokens=None, lm_head=None)
    step = Optimizer(optimizer, loss)
    moments = optimizer.init(trained)
    rng = np.random.default_rng(seed)
    for index in range(steps):
        sequences = windows(tokens, batch, length, rng)
        at = rng.integers(1, length - block_size, (batch, anchors), dtype=np.int32)
        trained, moments, metrics = step(trained, moments, frozen, sequences, at)
        progress(index, metrics)
    return with_target(trained, target)
