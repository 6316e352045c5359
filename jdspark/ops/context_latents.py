from __future__ import annotations

import jax

from . import contracts
from .norm_rope import norm_rope


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

    The GEMM is XLA's on every backend; `backend` picks the norm and rope.

    Args:
        projected: `[N, H]`, `hidden_norm(fc(captured))`; cast to the weights' dtype.
        positions: `[N]` int32, clipped to the rope table.
        kv_a_proj: `[L, D, H]`.
        kv_a_norm: `[L, kv_lora_rank]`.
        cos, sin: `[length, (D - kv_lora_rank) / 2]` fp32.
        eps: of the RMSNorm, static.

    Returns:
        `[N, L, D]` in the weights' dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.context_latents(projected, positions, kv_a_proj, kv_a_norm, cos, sin)
    num_layers, width, hidden = kv_a_proj.shape
    stacked = kv_a_proj.reshape(num_layers * width, hidden)
    # the barrier keeps the GEMM's rounding to the weights' dtype, which XLA may skip inside a fusion
    latents = jax.lax.optimization_barrier(projected.astype(kv_a_proj.dtype) @ stacked.T)
    latents = latents.reshape(-1, num_layers, width)
    return norm_rope(latents, positions, kv_a_norm, cos, sin, eps=eps, backend=backend)
