"""Training the byte-level target: next-token cross-entropy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..byte_lm import ByteLMConfig, ByteLMParams, causal_forward, logits
from .corpus import windows
from .loop import Optimizer, Progress, cast


def cross_entropy(params: ByteLMParams, config: ByteLMConfig, tokens: jax.Array) -> jax.Array:
    """Mean nats per byte of `tokens [B, T+1]`."""
    hidden, _ = causal_forward(params, config, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, hidden), tokens[:, 1:]))


def train_target(
    config: ByteLMConfig,
    params: ByteLMParams,
    tokens: np.ndarray,
    *,
    steps: int,
    batch: int,
    length: int,
    optimizer: optax.GradientTransformation,
    dtype: str,
    seed: int,
    progress: Progress,
) -> ByteLMParams:
    """Train on random windows of `tokens`; fp32 weights, forward and backward in `dtype`.

    Returns the fp32 weights; `progress` gets the loss.
    """
    step = Optimizer(optimizer, lambda params, tokens: (cross_entropy(cast(params, dtype), config, tokens), {}))
    moments = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for index in range(steps):
        params, moments, metrics = step(params, moments, windows(tokens, batch, length + 1, rng))
        progress(index, metrics)
    return params


def evaluate_target(
    config: ByteLMConfig, params: ByteLMParams, tokens: np.ndarray, *, batch: int, length: int, batches: int = 8
) -> float:
    """Cross-entropy in bits per byte over random windows of held-out tokens, in the weights' dtype."""
    loss = jax.jit(functools.partial(cross_entropy, config=config))
    rng = np.random.default_rng(0)
    losses = [float(loss(params, tokens=windows(tokens, batch, length + 1, rng))) for _ in range(batches)]
    return float(np.mean(losses) / np.log(2))
