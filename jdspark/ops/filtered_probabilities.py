from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .row_argmax import row_argmax


def filtered_probabilities(logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The distribution that a request samples from.

    `softmax(logits / temperature)` over the tokens that are left: of the k most probable ones (`top_k`), the smallest set
    of most probable ones whose share reaches `top_p`. A token as probable as the last one kept is kept as well, so the
    result does not depend on an order among equals.

    Args:
        logits: `[rows, V]` float32.
        temperature: `[rows]` float32. A row that is not above 0 is greedy: one at the argmax of `accept_strict` (the lowest
            index among equals, the first NaN), zero elsewhere. So is a row whose largest logit is not finite.
        top_k: `[rows]` int32; below 1 keeps all.
        top_p: `[rows]` float32; 1 keeps all, and the most probable token is always kept.

    Returns:
        `[rows, V]` float32; a token that was filtered out has exactly 0.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.filtered_probabilities(logits, temperature, top_k, top_p)
    logits = jnp.asarray(logits, jnp.float32)
    temperature, top_k, top_p = (jnp.asarray(x)[:, None] for x in (temperature, top_k, top_p))
    vocab_size = logits.shape[1]
    largest = jnp.max(logits, axis=1, keepdims=True)
    samples = (temperature > 0) & jnp.isfinite(largest)

    # shifted first: a small temperature cannot overflow
    scaled = (logits - largest) / jnp.where(samples, temperature, 1)
    ordered = jnp.sort(scaled, axis=1, descending=True)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    kept = ordered >= jnp.take_along_axis(ordered, k - 1, axis=1)
    weights = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=1)
    before = jnp.cumsum(weights, axis=1) - weights
    # the sums are rounded and may reach 1 early, so 1 is a case of its own
    kept &= (before < top_p) | (top_p >= 1)
    num_kept = jnp.maximum(jnp.sum(kept, axis=1, keepdims=True), 1)
    least = jnp.take_along_axis(ordered, num_kept - 1, axis=1)
    probabilities = jax.nn.softmax(jnp.where(scaled >= least, scaled, -jnp.inf), axis=1)
    greedy = jax.nn.one_hot(row_argmax(logits), vocab_size, dtype=jnp.float32)
    return jnp.where(samples, probabilities, greedy)
