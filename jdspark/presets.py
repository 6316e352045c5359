"""Ready-made drafter configs, and random weights for them: for tests, demonstrations and benchmarks."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
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

K3_RANK = dataclasses.replace(K3_DSPARK, num_attention_heads=8, intermediate_size=1792)
"""One of 8 tensor-parallel ranks of it: its heads and its part of the MLP; its share of the vocabulary is the output head's."""

K3_RANK_VOCAB = 20480
"""Rows of `lm_head` and `markov_w2` on one rank."""

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


def random_drafter(
    config: DrafterConfig, seed: int, *, dtype: str = "bfloat16", lm_head: bool = True, on_device: bool = False
) -> DrafterParams:
    """Random weights, scaled so that activations stay near 1; `lm_head` adds a random target head.

    `on_device` draws them where they will live, other numbers than NumPy's, which takes long for billions of them.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)

    def normal(name: str, shape: tuple[int, ...]) -> Any:
        if on_device:
            return jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, dtype)
        return rng.standard_normal(shape)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        values = normal(name, shape)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif not name.startswith(("embed_tokens", "markov_w1")):
            values = values / np.sqrt(shape[-1])
        return jnp.asarray(values, dtype)

    params = assemble_params(config, {name: draw(name, shape) for name, shape in required_shapes(config).items()})
    if lm_head:
        params = params.with_lm_head(draw("lm_head", (config.vocab_size, config.hidden_size)))
    return params


def k3_rank_drafter(seed: int) -> DrafterParams:
    """Random weights of `K3_RANK`, drawn on the device: 4 GB."""
    params = random_drafter(K3_RANK, seed, lm_head=False, on_device=True)
    markov_w2: Any = params.markov_w2
    head = jax.random.normal(jax.random.key(seed + 1), (K3_RANK_VOCAB, K3_RANK.hidden_size), "bfloat16")
    params = params.with_lm_head(head / jnp.sqrt(jnp.bfloat16(K3_RANK.hidden_size)))
    return dataclasses.replace(params, markov_w2=markov_w2[:K3_RANK_VOCAB])
