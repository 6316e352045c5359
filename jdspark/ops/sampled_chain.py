from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .filtered_probabilities import filtered_probabilities
from .markov_chain import markov_bias
from .randomness import DRAFT, RowSampling, draw, gumbel_noise, token_keys


def sampled_chain(
    base_logits: jax.Array, anchor: jax.Array, w1: jax.Array | None, w2: jax.Array | None, sampling: RowSampling
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`markov_chain` with each draft drawn from its filtered distribution instead of picked.

    Slot i's logits are shifted by the bias of the token drawn in the slot before, so its distribution is conditioned on the
    drafted prefix: the one that `accept_sampled` has to know.

    Args:
        base_logits: `[B, K, V]` float32.
        anchor, w1, w2: as in `markov_chain`; no `w1` and `w2`: no bias.
        sampling: `[B]` each; `positions` is the first draft's. A greedy row (temperature 0) gets `markov_chain`'s drafts.

    Returns:
        corrected_logits `[B, K, V]` float32, draft_probabilities `[B, K, V]` float32, tokens `[B, K]` int32.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.sampled_chain(base_logits, anchor, w1, w2, sampling)
    base_logits = jnp.asarray(base_logits, jnp.float32)
    num_gen, K, vocab_size = base_logits.shape
    each = sampling.repeated(K)
    noise = gumbel_noise(token_keys(each.seeds, each.positions, DRAFT), vocab_size).reshape(base_logits.shape)
    previous = jnp.asarray(anchor)
    corrected, probabilities, tokens = [], [], []
    for i in range(K):
        logits = base_logits[:, i]
        if w1 is not None and w2 is not None:
            logits = logits + markov_bias(previous, w1, w2)
        distribution = filtered_probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        previous = draw(noise[:, i], distribution)
        corrected.append(logits)
        probabilities.append(distribution)
        tokens.append(previous)
    if K == 0:
        return base_logits, base_logits, jnp.zeros((num_gen, 0), jnp.int32)
    return jnp.stack(corrected, axis=1), jnp.stack(probabilities, axis=1), jnp.stack(tokens, axis=1)
