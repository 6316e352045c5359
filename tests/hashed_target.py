"""A cheap target whose every logit depends on the whole prefix, and a drafter that is often right about it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdspark.config import DrafterConfig
from jdspark.presets import TINY, random_drafter

BIGRAM = dataclasses.replace(TINY, markov_rank=TINY.vocab_size)
"""A drafter whose Markov head can hold a whole table of token pairs."""
TABLE_ROWS = 251


@functools.partial(jax.jit, donate_argnums=1)
def _forward(tables, cache, tokens, start, num_tokens, slots):
    """`[B, T]` tokens -> logits `[B, T, V]`, captured `[B, T, C]`; writes the cache first, reads the prefix from it."""
    pairs, mixed, captured = tables
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    cache = cache.at[slots[:, None], positions].set(tokens, mode="drop")
    columns = jnp.arange(cache.shape[1], dtype=jnp.uint32)
    terms = (cache[slots].astype(jnp.uint32) + 1) * (columns * jnp.uint32(2654435761) + jnp.uint32(97))
    sums = jnp.cumsum(terms, axis=1)  # mod 2^32: exact in any order
    prefix = jnp.take_along_axis(sums, positions, axis=1, mode="clip")
    row = (prefix >> 7) % TABLE_ROWS
    return pairs[tokens] + mixed[row], captured[tokens] + captured[row % captured.shape[0]], cache


class HashedTarget:
    """logits = a table of token pairs + `mixing` * a row picked by a hash of all tokens so far."""

    def __init__(self, config: DrafterConfig = TINY, *, mixing: float = 1.0, seed: int = 0):
        rng = np.random.default_rng(seed)
        V = config.vocab_size
        self.config = config
        self.vocab_size, self.captured_size = V, config.captured_size
        self.lm_head = jnp.asarray(rng.standard_normal((V, config.hidden_size)), jnp.float32)
        self.pairs = rng.standard_normal((V, V)).astype(np.float32)
        self.mixed = (mixing * rng.standard_normal((TABLE_ROWS, V))).astype(np.float32)
        self._tables = tuple(jnp.asarray(x) for x in (self.pairs, self.mixed, rng.standard_normal((V, self.captured_size))))
        self.verified = []
        """Shape of every `verify` call."""

    def init_cache(self, num_slots, max_len):
        self.cache_shape = (num_slots, max_len)
        return jnp.zeros((num_slots, max_len), jnp.int32)

    def prefill(self, cache, tokens, start, num_tokens, slots):
        logits, captured, cache = _forward(self._tables, cache, tokens, start, num_tokens, slots)
        return logits[jnp.arange(len(num_tokens)), num_tokens - 1], captured, cache

    def verify(self, cache, tokens, start, slots):
        self.verified.append(tokens.shape)
        return _forward(self._tables, cache, tokens, start, np.full_like(start, tokens.shape[1]), slots)

    def logits(self, tokens) -> np.ndarray:
        """After a whole sequence, in NumPy: an account of its own."""
        weights = (np.arange(len(tokens), dtype=np.uint64) * 2654435761 + 97) & 0xFFFFFFFF
        prefix = int(((np.asarray(tokens, np.uint64) + 1) * weights).sum()) & 0xFFFFFFFF
        return self.pairs[tokens[-1]] + self.mixed[(prefix >> 7) % TABLE_ROWS]

    def rollout(self, prompt, num_tokens: int) -> list[int]:
        """Its own greedy continuation."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


def bigram_drafter(target: HashedTarget, *, scale: float = 1.0):
    """Drafts from the target's table of pairs alone, through the Markov head: right where the hash does not decide."""
    params = random_drafter(BIGRAM, 1, dtype="float32")
    V = BIGRAM.vocab_size
    return dataclasses.replace(
        params,
        lm_head=jnp.zeros((V, BIGRAM.hidden_size)),
        markov_w1=jnp.eye(V),
        markov_w2=jnp.asarray(scale * target.pairs.T),
    )
