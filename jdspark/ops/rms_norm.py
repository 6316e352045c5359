from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, backend: str = "xla") -> jax.Array:
    """RMSNorm over the last axis: `w * (x * rsqrt(mean(x^2) + eps))` in fp32, cast to x's dtype.

    Args:
        x: `[..., H]`.
        weight: `[H]`, or `[L, H]` for `x [..., L, H]`.
        eps: static.

    Returns:
        `[..., H]` in x's dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.rms_norm(x, weight)
    if backend != "xla":
        return kernel("rms_norm", backend)(x, weight, eps)

    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (weight.astype(jnp.float32) * y).astype(x.dtype)
