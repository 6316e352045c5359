from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdspark.ops import BlockPlacement

from .launch import Ref, floor_div, floor_mod, launch, struct


def upper_triangle(block_size: int) -> jax.Array:
    """`[1, block_size, 1, block_size]`: key index > query index. A constant, nothing is launched for it."""
    return jnp.asarray(np.triu(np.ones((block_size, block_size), bool), 1)[None, :, None, :])


def place(
    position: jax.Array, owned: jax.Array, block_row: Callable[[jax.Array], jax.Array], page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page (-1 from column `owned` on) and offset of one position; `block_row` turns a column into a page."""
    column = floor_div(position, page_size)
    inside = (column >= 0) & (column < owned)
    return jnp.where(inside, block_row(jnp.where(inside, column, 0)), -1), floor_mod(position, page_size)


@functools.partial(jax.jit, static_argnames=("block_size", "page_size", "first_row"))
def block_placement(
    advertised: jax.Array,
    block_tables: jax.Array,
    *,
    block_size: int,
    page_size: int,
    first_row: int = 0,
    block_counts: jax.Array | None = None,
) -> BlockPlacement:
    """`[B]`, `[rows, max_blocks]` -> BlockPlacement. One launch, one program per request.

    `page_tables` is a slice of the tables, which XLA makes.
    """
    num_gen, max_blocks = advertised.shape[0], block_tables.shape[1]
    page_tables = lax.slice_in_dim(block_tables, first_row, first_row + num_gen)
    upper = upper_triangle(block_size)
    if num_gen == 0:
        empty = jnp.zeros((0, block_size), jnp.int32)
        return BlockPlacement(empty, empty, upper, page_tables, jnp.zeros(0, jnp.int32))
    counts = () if block_counts is None else (block_counts,)

    def block_placement_kernel(advertised: Ref, block_tables: Ref, *refs: Ref) -> None:
        *counts, pages, offsets, seq_lens = refs
        b = lax.axis_index("request")
        length = advertised[b]
        owned = jnp.clip(counts[0][first_row + b], 0, max_blocks) if counts else jnp.int32(max_blocks)
        for j in range(block_size):
            pages[b, j], offsets[b, j] = place(length + j, owned, lambda column: block_tables[first_row + b, column], page_size)
        seq_lens[b] = length + block_size

    pages, offsets, seq_lens = launch(
        block_placement_kernel,
        out_type=(
            struct((num_gen, block_size), jnp.int32),
            struct((num_gen, block_size), jnp.int32),
            struct((num_gen,), jnp.int32),
        ),
        grid={"request": num_gen},
    )(advertised, block_tables, *counts)
    return BlockPlacement(pages, offsets, upper, page_tables, seq_lens)
