from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .checks import Array
from .safety import gen_slice, safe_block_counts


class BlockPlacement(NamedTuple):
    """Where the block lies in the pages; the same for every layer, so built once per step."""

    pages: Array
    """`[B, block_size]` int32; -1 where the request owns no page: writes drop it, reads mask it."""
    offsets: Array
    """`[B, block_size]` int32, inside the page."""
    upper: Array
    """`[1, block_size, 1, block_size]` bool: key index > query index, for kernels that are causal inside the block."""
    page_tables: Array
    """`[B, max_blocks]` int32, the gen rows of the block tables."""
    seq_lens: Array
    """`[B]` int32, `advertised + block_size`: the drafter's key count."""


def block_placement(
    advertised: jax.Array,
    block_tables: jax.Array,
    *,
    block_size: int,
    page_size: int,
    first_row: int = 0,
    block_counts: jax.Array | None = None,
    backend: str = "xla",
) -> BlockPlacement:
    """Pages and offsets of the block's positions `advertised[b] + j`, `j < block_size`.

    Args:
        advertised: `[B]` int32, context tokens the block attends to.
        block_tables: `[rows, max_blocks]` int32.
        block_size, page_size: static.
        first_row: the first gen request's row (= num_contexts), static.
        block_counts: `[rows]` int32. A position whose page column is at or past the row's count gets page -1; without
            counts the table's width bounds it.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a static number out of range.
    """
    contracts.block_placement(advertised, block_tables, block_size, page_size, first_row, block_counts)
    if backend != "xla":
        return kernel("block_placement", backend)(
            advertised, block_tables,
            block_size=block_size, page_size=page_size, first_row=first_row, block_counts=block_counts,
        )  # fmt: skip

    num_gen, max_blocks = advertised.shape[0], block_tables.shape[1]
    page_tables = gen_slice(block_tables, first_row, num_gen)
    if block_counts is None:
        owned = jnp.full(num_gen, max_blocks, jnp.int32)
    else:
        owned = safe_block_counts(gen_slice(block_counts, first_row, num_gen), max_blocks)
    j = jnp.arange(block_size, dtype=jnp.int32)
    positions = jnp.asarray(advertised)[:, None] + j
    column = positions // page_size
    inside = (column >= 0) & (column < owned[:, None])
    pages = jnp.take_along_axis(page_tables, jnp.where(inside, column, 0), axis=1)
    return BlockPlacement(
        pages=jnp.where(inside, pages, -1),
        offsets=positions % page_size,
        upper=(j[None, :] > j[:, None])[None, :, None, :],
        page_tables=page_tables,
        seq_lens=jnp.asarray(advertised) + block_size,
    )
