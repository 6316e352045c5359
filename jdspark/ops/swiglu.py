from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def swiglu(gate: jax.Array, up: jax.Array, *, backend: str = "xla") -> jax.Array:
    """`silu(gate) * up` in fp32, `silu(x) = x / (1 + exp(-x))`, cast to the gate's dtype.

    Args:
        gate, up: `[..., I]` of one dtype.

    Returns:
        `[..., I]`.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.swiglu(gate, up)
    if backend != "xla":
        return kernel("swiglu", backend)(gate, up)

    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
