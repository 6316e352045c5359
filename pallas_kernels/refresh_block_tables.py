from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .launch import Piece, Ref, ceil_div, launch, pieces, struct, total

CHUNK = 1024
"""Columns that one program decodes."""


def count_pages(row: Ref, max_blocks: int, chunk: int = CHUNK) -> jax.Array:
    """How many of the row's encoded offsets are no placeholders, as a scalar."""
    # all of them are on their way before the first one is looked at
    loaded = [
        (piece, piece.load(row, start))
        for start in range(0, max_blocks, chunk)
        for piece in pieces(min(chunk, max_blocks - start), jnp.int32, max_blocks)
    ]
    parts = []
    for piece, encoded in loaded:
        owned = encoded >= 0
        if piece.fresh != piece.start:
            owned &= piece.positions() >= piece.fresh
        parts.append((piece, owned.astype(jnp.int32)))
    # chunks cut alike are added thread by thread first: one sum over the threads for all of them
    sums: dict[Piece, jax.Array] = {}
    for piece, part in parts:
        sums[piece] = sums[piece] + part if piece in sums else part
    return functools.reduce(jnp.add, [total(part) for part in sums.values()])


def decode_chunk(row: Ref, block_row: Ref, chunk: jax.Array, max_blocks: int, divisor: int) -> None:
    """Decode the columns of one chunk; the last chunk reaches back, so that all are equally wide."""
    width = min(CHUNK, max_blocks)
    start = jnp.minimum(chunk * width, max_blocks - width)
    for piece in pieces(width, jnp.int32, max_blocks):
        encoded = jnp.maximum(piece.load(row, start), 0)
        piece.store(block_row, lax.div(encoded, piece.splat(divisor, jnp.int32)) if divisor > 1 else encoded, start)


@functools.partial(jax.jit, static_argnames=("pool_idx", "num_seqs", "divisor"))
def refresh_block_tables(
    encoded_offsets: jax.Array, *, pool_idx: int, num_seqs: int, divisor: int
) -> tuple[jax.Array, jax.Array]:
    """`[pools, seqs, 2, max_blocks]` -> block_tables `[num_seqs, max_blocks]`, block_counts `[num_seqs]`.

    One launch. Per row, one program for each chunk of columns, which decodes it, and one that counts the row's pages.
    """
    max_blocks = encoded_offsets.shape[3]
    if num_seqs == 0 or max_blocks == 0:
        return jnp.zeros((num_seqs, max_blocks), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    chunks = ceil_div(max_blocks, CHUNK)

    def refresh_block_tables_kernel(encoded: Ref, block_tables: Ref, block_counts: Ref) -> None:
        part, row = lax.axis_index("part"), lax.axis_index("row")
        encoded_row = encoded.at[pool_idx, row, 0]

        @pl.when(part == 0)  # first, since it takes longest
        def _count() -> None:
            block_counts[row] = count_pages(encoded_row, max_blocks)

        @pl.when(part > 0)
        def _decode() -> None:
            decode_chunk(encoded_row, block_tables.at[row], part - 1, max_blocks, divisor)

    return launch(
        refresh_block_tables_kernel,
        out_type=(struct((num_seqs, max_blocks), jnp.int32), struct((num_seqs,), jnp.int32)),
        grid={"part": chunks + 1, "row": num_seqs},
    )(encoded_offsets)
