from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jdspark.ops import contracts

from .linear import product_in_jax, product_in_torch

if TYPE_CHECKING:
    import torch


def head_product(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """Each head's own product with the kernel of `linear`; see `jdspark.ops.head_product`."""
    contracts.head_product(x, weight, transposed)

    N, K = weight.shape[1:] if transposed else weight.shape[:0:-1]
    rows = x.flatten(0, 1)
    return product_in_torch(rows, weight, None, N, (K, 1) if transposed else (1, N)).unflatten(0, x.shape[:2])


def head_product_in_jax(x: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """See `jdspark.ops.head_product`."""
    N, K = weight.shape[1:] if transposed else weight.shape[:0:-1]
    rows = jnp.asarray(x).reshape(-1, *x.shape[2:])
    out = product_in_jax(rows, jnp.asarray(weight), None, N, (K, 1) if transposed else (1, N))
    return out.reshape(*x.shape[:3], N)
