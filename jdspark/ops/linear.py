from __future__ import annotations

import jax

from . import contracts
from .backends import kernel


def linear(x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None, backend: str = "xla") -> jax.Array:
    """`x @ weight.T`, summed in fp32 and rounded to the weight's dtype; then `residual +` that, rounded once more.

    Args:
        x: `[..., K]`, cast to the weight's dtype.
        weight: `[N, K]`.
        residual: `[..., N]`; a kernel wants the weight's dtype.

    Returns:
        `[..., N]`.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.linear(x, weight, residual)
    if backend != "xla":
        return kernel("linear", backend)(x, weight, residual=residual)

    # the barrier keeps XLA from fusing the rounding away
    product = jax.lax.optimization_barrier(x.astype(weight.dtype) @ weight.T)
    return product if residual is None else residual + product
