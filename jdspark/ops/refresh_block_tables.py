from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel


def refresh_block_tables(
    encoded_offsets: jax.Array, *, pool_idx: int, num_seqs: int, divisor: int, backend: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Decode the page manager's table of one pool into page numbers.

    Args:
        encoded_offsets: `[pools, seqs, 2, max_blocks]` int32; `[..., 0, :]` holds the offsets, negative = placeholder.
        pool_idx: which pool's table, static.
        num_seqs: rows of the batch (context rows first), static.
        divisor: offsets per page, static: `kv_factor` for the interleaved pool view, `pool_layers * kv_factor` for the
            page-major slice.

    Returns:
        block_tables: `[num_seqs, max_blocks]` int32, `max(e, 0) // divisor`; placeholders decode to page 0.
        block_counts: `[num_seqs]` int32, the offsets that are not placeholders. A placeholder between two pages is not
            counted and does not end the count.

    Raises:
        TypeError, ValueError: wrong dtype or shape, `pool_idx`, `num_seqs` or `divisor` out of range.
    """
    contracts.refresh_block_tables(encoded_offsets, pool_idx, num_seqs, divisor)
    if backend != "xla":
        return kernel("refresh_block_tables", backend)(encoded_offsets, pool_idx=pool_idx, num_seqs=num_seqs, divisor=divisor)

    encoded = jnp.asarray(encoded_offsets)[pool_idx, :num_seqs, 0]
    block_counts = jnp.sum(encoded >= 0, axis=1, dtype=jnp.int32)
    block_tables = jnp.maximum(encoded, 0) // divisor
    return block_tables, block_counts
