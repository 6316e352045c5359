from __future__ import annotations

import jax

from . import contracts
from .backends import FloatBackends
from .linear import linear
from .norm_rope import norm_rope


def stacked_product(projected: jax.Array, kv_a_proj: jax.Array, *, backend: str = "xla") -> jax.Array:
    """One GEMM with all layers' `kv_a_proj` `[L, D, H]`: `[N, H]` -> `[N, L, D]`."""
    num_layers, width, hidden = kv_a_proj.shape
    stacked = kv_a_proj.reshape(num_layers * width, hidden)
    return linear(projected, stacked, backend=backend).reshape(-1, num_layers, width)


def context_latents(
    projected: jax.Array,
    positions: jax.Array,
    kv_a_proj: jax.Array,
    kv_a_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    backend: str = "xla",
) -> jax.Array:
    """Every layer's latent of the projected context rows: one GEMM over the stacked layers, then `norm_rope`.

    Args:
        projected: `[N, H]`, `hidden_norm(fc(captured))`; cast to the weights' dtype.
        positions: `[N]` int32, clipped to the rope table.
        kv_a_proj: `[L, D, H]`.
        kv_a_norm: `[L, kv_lora_rank]`.
        cos, sin: `[length, (D - kv_lora_rank) / 2]` fp32.
        eps: of the RMSNorm, static.
        backend: of norm and rope, and of the GEMM if it has a kernel for it.

    Returns:
        `[N, L, D]` in the weights' dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.context_latents(projected, positions, kv_a_proj, kv_a_norm, cos, sin)
    latents = stacked_product(projected, kv_a_proj, backend=FloatBackends.of(backend).linear)
    return norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps, backend=backend)
