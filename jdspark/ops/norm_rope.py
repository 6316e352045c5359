from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis: `w * (x * rsqrt(mean(x^2) + eps))` in fp32, cast to x's dtype."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (weight.astype(jnp.float32) * y).astype(x.dtype)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (re, im) of the last axis: `(re*cos - im*sin, re*sin + im*cos)` in fp32, cast to x's dtype.

    `cos`, `sin`: fp32, half of x's last axis, broadcast against the rest.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    re, im = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([re * cos - im * sin, re * sin + im * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def at_positions(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of a rope table; positions outside it are clipped (they belong to padding or to corrupted state)."""
    return jnp.asarray(table)[jnp.clip(positions, 0, table.shape[0] - 1)]


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
