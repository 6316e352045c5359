from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, backend: str = "xla") -> jax.Array:
    """Rotate adjacent pairs (re, im) of the last axis: `(re*cos - im*sin, re*sin + im*cos)` in fp32, cast to x's dtype.

    Args:
        x: `[..., heads, rope]`.
        cos, sin: `[..., 1, rope/2]` fp32, those of each token's position (`at_positions`).

    Returns:
        `[..., heads, rope]` in x's dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.rope(x, cos, sin)
    if backend != "xla":
        return kernel("rope", backend)(x, cos, sin)

    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    re, im = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([re * cos - im * sin, re * sin + im * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def at_positions(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of a rope table; positions outside it are clipped (they belong to padding or to corrupted state)."""
    return jnp.asarray(table)[jnp.clip(positions, 0, table.shape[0] - 1)]
