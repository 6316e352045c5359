from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def head_product(x: jax.Array, weight: jax.Array, *, transposed: bool = False, backend: str = "xla") -> jax.Array:
    """Each head's own product: `x[:, :, h] @ weight[h]`, summed in fp32 and rounded to x's dtype.

    The two halves of `kv_b_proj`: `k_b` absorbed into the query, and `v_b`, which the checkpoint holds transposed.

    Args:
        x: `[B, T, heads, K]`.
        weight: `[heads, K, N]`, or `[heads, N, K]` with `transposed`; of x's dtype.

    Returns:
        `[B, T, heads, N]`.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.head_product(x, weight, transposed)
    if backend != "xla":
        return kernel("head_product", backend)(x, weight, transposed=transposed)

    # the barrier keeps XLA from fusing the rounding away
    return jax.lax.optimization_barrier(jnp.einsum("bthk,hnk->bthn" if transposed else "bthk,hkn->bthn", x, weight))
