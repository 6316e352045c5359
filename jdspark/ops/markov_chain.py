from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .row_argmax import row_argmax
from .safety import safe_tokens


def markov_bias(previous: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """`w1[previous] @ w2.T`, `[B]` -> `[B, V]` float32, rounded to the weights' dtype on the way."""
    w1, w2 = jnp.asarray(w1), jnp.asarray(w2)
    # Without the barrier XLA adds the unrounded product (at batch 1 always): other bits than a GEMM that returns w1's dtype
    return jax.lax.optimization_barrier(w1[safe_tokens(previous, w1.shape[0])] @ w2.T).astype(jnp.float32)


def markov_chain(
    base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array, *, backend: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Pick the drafts left to right, each slot's logits shifted by a low-rank bias of the token before it.

    For slot i: `logits_i = base_i + w1[prev] @ w2.T`, `prev` = argmax of the slot before, `anchor` for the first. The
    product is rounded to the weights' dtype, the sum is in fp32; argmax as in `accept_strict`.

    Args:
        base_logits: `[B, K, V]` float32.
        anchor: `[B]` int32, the bonus token, clipped to the rows of `w1`.
        w1: `[V1, r]`, `V1 >= V` where `w2` is a vocabulary shard.
        w2: `[V, r]`.

    Returns:
        corrected_logits `[B, K, V]` float32 and tokens `[B, K]` int32.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.markov_chain(base_logits, anchor, w1, w2)
    if backend != "xla":
        return kernel("markov_chain", backend)(base_logits, anchor, w1, w2)

    num_gen, K, _ = base_logits.shape
    base_logits = jnp.asarray(base_logits, jnp.float32)
    previous = jnp.asarray(anchor)
    corrected, tokens = [], []
    for i in range(K):
        logits = base_logits[:, i] + markov_bias(previous, w1, w2)
        previous = row_argmax(logits)
        corrected.append(logits)
        tokens.append(previous)
    if K == 0:
        return base_logits, jnp.zeros((num_gen, 0), jnp.int32)
    return jnp.stack(corrected, axis=1), jnp.stack(tokens, axis=1)
