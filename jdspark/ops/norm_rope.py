from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .rms_norm import rms_norm
from .rope import at_positions, rope


def norm_rope(
    latents: jax.Array,
    positions: jax.Array,
    kv_a_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    backend: str = "xla",
) -> jax.Array:
    """RMSNorm of the first `kv_lora_rank` numbers of each latent, RoPE of the rest.

    The context's and the block's latents both go through here: the two halves of one attention agree bit for bit.

    Args:
        latents: `[N, L, D]`, outputs of the layers' `kv_a_proj`.
        positions: `[N]` int32, clipped to the rope table.
        kv_a_norm: `[L, kv_lora_rank]`.
        cos, sin: `[length, (D - kv_lora_rank) / 2]` fp32.
        eps: of the RMSNorm, static.

    Returns:
        `[N, L, D]` in the latents' dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.norm_rope(latents, positions, kv_a_norm, cos, sin)
    if backend != "xla":
        return kernel("norm_rope", backend)(latents, positions, kv_a_norm, cos, sin, eps=eps)

    latents, rank = jnp.asarray(latents), kv_a_norm.shape[1]
    positions = jnp.asarray(positions)[:, None]
    normed = rms_norm(latents[..., :rank], kv_a_norm, eps)
    rotated = rope(latents[..., rank:], at_positions(cos, positions), at_positions(sin, positions))
    return jnp.concatenate([normed, rotated], axis=-1)
