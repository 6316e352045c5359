from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .bits import as_bits, from_bits
from .safety import safe_tokens


def noise_block(
    embedding: jax.Array,
    bonus: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
    mask_row: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    """The drafter's input: the embedded bonus token, then the mask row in every other slot.

    Args:
        embedding: `[V, H]`, the drafter's own embedding.
        bonus: `[B]` int32, clipped to `[0, V)`.
        block_size: slots per request, static.
        mask_token_id: row of `embedding` used for the masked slots when there is no `mask_row`, static.
        mask_row: `[H]` or `[1, H]`, the drafter's trained mask embedding; cast to the embedding's dtype.

    Returns:
        `[B, block_size, H]` in the embedding's dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape; `mask_token_id` outside the embedding and no `mask_row`.
    """
    contracts.noise_block(embedding, bonus, block_size, mask_token_id, mask_row)
    if backend != "xla":
        return kernel("noise_block", backend)(
            embedding, bonus, block_size=block_size, mask_token_id=mask_token_id, mask_row=mask_row
        )

    vocab_size, hidden = embedding.shape
    embedding = jnp.asarray(embedding)
    anchor = embedding[safe_tokens(bonus, vocab_size)]
    mask = embedding[mask_token_id] if mask_row is None else jnp.reshape(mask_row, hidden).astype(embedding.dtype)
    masks = jnp.broadcast_to(as_bits(mask), (anchor.shape[0], block_size - 1, hidden))
    block = jnp.concatenate([as_bits(anchor)[:, None], masks], axis=1)
    # without the barrier XLA cancels the casts and joins floats after all
    return from_bits(jax.lax.optimization_barrier(block), embedding.dtype)
