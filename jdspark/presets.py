"""Ready-made drafter configs, and random weights for them: for tests, demonstrations and benchmarks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from .checkpoint import assemble_params, required_shapes
from .config import DrafterConfig, YarnConfig
from .params import DrafterParams

K3_DSPARK = DrafterConfig(
    num_hidden_layers=5,
    hidden_size=7168,
    vocab_size=163840,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    num_target_layers=5,
    target_hidden_size=7168,
    max_position_embeddings=1048576,
    mask_token_id=163837,
    rope=YarnConfig(rope_theta=50000.0, factor=32.0, original_max_position_embeddings=32768, mscale=1.0, mscale_all_dim=1.0),
    target_layer_ids=(2, 23, 47, 71, 89),
    markov_rank=256,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)
"""Kimi K3's published MLA DSpark drafter."""

SMALL_K3 = dataclasses.replace(
    K3_DSPARK,
    hidden_size=128,
    vocab_size=384,
    num_attention_heads=4,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    v_head_dim=16,
    intermediate_size=256,
    target_hidden_size=32,
    mask_token_id=381,
    markov_rank=16,
)
"""The same drafter with its latents (512 + 64), layers, rope and heads switches kept, and small hidden and vocab."""

TINY = dataclasses.replace(
    SMALL_K3,
    num_hidden_layers=2,
    hidden_size=32,
    vocab_size=64,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    num_target_layers=2,
    target_hidden_size=16,
    target_layer_ids=(1, 3),
    mask_token_id=61,
    markov_rank=8,
)
"""Everything as small as it can be, for tests that compile many variants."""


def random_drafter(config: DrafterConfig, seed: int, *, dtype: str = "bfloat16", lm_head: bool = True) -> DrafterParams:
    """Random weights, scaled so that activations stay near 1; `lm_head` adds a random target head."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        if "norm" in name:
            values = 1 + 0.1 * rng.standard_normal(shape)
        elif name.startswith(("embed_tokens", "markov_w1")):
            values = rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return jnp.asarray(values, dtype)

    params = assemble_params(config, {name: draw(name, shape) for name, shape in required_shapes(config).items()})
    if lm_head:
        params = params.with_lm_head(draw("lm_head", (config.vocab_size, config.hidden_size)))
    return params
