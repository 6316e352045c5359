from __future__ import annotations

import jax
import jax.numpy as jnp

Candidate = tuple[jax.Array, jax.Array]
"""A value and its index."""


def better(one: Candidate, other: Candidate) -> Candidate:
    """Whichever comes first in torch's order: NaN above everything, larger above smaller, lower index among equals.

    The same for every grouping and order of the candidates: a GPU reduces a row in a tree whose leaves lie far apart.
    """
    (x, i), (y, j) = one, other
    x_nan, y_nan = x != x, y != y
    equal = (x == y) | (x_nan & y_nan)
    chosen = (x > y) | (x_nan & ~y_nan) | (equal & (i < j))
    return jnp.where(chosen, x, y), jnp.where(chosen, i, j)


def row_argmax(x: jax.Array) -> jax.Array:
    """The argmax over the last axis as torch has it: `[..., V]` -> `[...]` int32.

    `jnp.argmax` has the same order but for several NaNs in a row: on a GPU it may answer any of them. Like there, an index has
    no gradient.
    """
    x = jax.lax.stop_gradient(x)
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    nothing = jnp.array(-jnp.inf, x.dtype), jnp.int32(jnp.iinfo(jnp.int32).max)
    return jax.lax.reduce((x, index), nothing, better, (x.ndim - 1,))[1]
