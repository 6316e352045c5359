"""Where the randomness of a sampled token comes from: its request's seed, its position, and what it is for. Nothing else.

So a request's output does not depend on its neighbours, its row or its slot. A position may be drafted again after a
rejection before it, with the same number as the first time; nothing that was kept has depended on that number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .checks import Array

DRAFT, ACCEPT, TARGET = 0, 1, 2
"""Purposes: drawing a draft, deciding on it, drawing the target's own token in its place."""


class RowSampling(NamedTuple):
    """How each row of a batch samples."""

    temperature: Array
    """`[rows]` float32; 0 is greedy."""
    top_k: Array
    """`[rows]` int32; 0 keeps every token."""
    top_p: Array
    """`[rows]` float32; 1 keeps every token."""
    seeds: Array
    """`[rows]` uint32."""
    positions: Array
    """`[rows]` int32: where the first token that the op decides stands in its request's sequence."""

    def gen_rows(self, num_contexts: int) -> RowSampling:
        """The rows behind the context rows."""
        return RowSampling(*(jnp.asarray(field)[num_contexts:] for field in self))

    def repeated(self, width: int) -> RowSampling:
        """One row per position: `[rows * width]`, the positions counting up inside each row."""
        fields = RowSampling(*(jnp.repeat(jnp.asarray(field), width) for field in self))
        steps = jnp.tile(jnp.arange(width, dtype=jnp.int32), jnp.shape(self.positions)[0])
        return fields._replace(positions=fields.positions + steps)


def token_keys(seeds: jax.Array, positions: jax.Array, purpose: int) -> jax.Array:
    """`[N]` keys: `fold_in(fold_in(key(seed), position), purpose)`, whatever JAX's default generator is."""

    def token_key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position), purpose)

    return jax.vmap(token_key)(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions))


def gumbel_noise(keys: jax.Array, vocab_size: int) -> jax.Array:
    """`[N]` keys -> `[N, V]` float32 for `draw`.

    With `mode="high"` it has float32's resolution at both ends: a plain 23-bit one ties among many tokens, and the lowest
    would win too often.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high"))(keys)


def draw(noise: jax.Array, weights: jax.Array) -> jax.Array:
    """One token per row from unnormalised weights: Gumbel noise `[N, V]`, weights `[N, V]` float32 -> `[N]` int32.

    The maximum of log-weight plus noise (Gumbel, 1954): a weight of zero has no chance, where a uniform number held against
    rounded cumulative sums could land on one.
    """
    return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)
