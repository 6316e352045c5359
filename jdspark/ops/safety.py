"""Device values are made safe, not trusted: nothing on a device can raise, and JAX would wrap or clamp in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def safe_slots(slots: jax.Array, ctx_len: jax.Array) -> jax.Array:
    """Slots `[B]` with everything outside `[0, max_batch]` replaced by the dummy slot, the last row of `ctx_len`."""
    dummy = ctx_len.shape[0] - 1
    return jnp.where((slots < 0) | (slots > dummy), dummy, slots)


def safe_num_accepted(num_accepted: jax.Array, K: int) -> jax.Array:
    """Accepted counts clipped to `1..K+1`: the target's own token always counts."""
    return jnp.clip(num_accepted, 1, K + 1)


def safe_tokens(tokens: jax.Array, vocab_size: int) -> jax.Array:
    """Token ids clipped to `[0, V)`."""
    return jnp.clip(tokens, 0, vocab_size - 1)


def safe_block_counts(block_counts: jax.Array, max_blocks: int) -> jax.Array:
    """Page counts clipped to what the table can name, `[0, max_blocks]`."""
    return jnp.clip(block_counts, 0, max_blocks)


def gen_slice(rows: jax.Array, first_row: int, num_gen: int) -> jax.Array:
    """The gen requests' rows of a per-row tensor."""
    return jax.lax.slice_in_dim(rows, first_row, first_row + num_gen, axis=0)
