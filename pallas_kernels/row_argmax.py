"""The argmax of long rows in two launches: partial winners of each part of a row, then their merge.

Both compare integer keys that order floats as torch's argmax does: the first NaN above everything, -0.0 equal to 0.0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .launch import WARPGROUP, Piece, Ref, ceil_div, largest, pieces, smallest

ENOUGH_PROGRAMS = 264
"""Two programs for each of an H200's 132 multiprocessors."""

LARGEST_PART, SMALLEST_PART = 8192, 1024
NOT_FOUND = jnp.iinfo(jnp.int32).max


def part_width(num_rows: int, width: int) -> int:
    """Elements of a row that one program compares: fewer where there are few rows, to spread them over the GPU."""
    part = LARGEST_PART
    while part > SMALLEST_PART and num_rows * ceil_div(width, part) < ENOUGH_PROGRAMS:
        part //= 2
    return min(part, width)


def order_keys(x: jax.Array, piece: Piece) -> jax.Array:
    """int32 keys with the order of the floats; every NaN gets the largest."""
    if piece.size == 1:
        return jnp.int32(0)  # alone in its row: the winner, whatever it is
    return ordered(x, lambda value: piece.splat(value, jnp.int32))


def ordered(x: jax.Array, splat: Callable[[int], jax.Array]) -> jax.Array:
    """The keys of any vector or matrix; `splat` makes one of its shape and layout from an integer."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    magnitude = bits & splat(0x7FFFFFFF)
    key = jnp.where(bits < 0, -magnitude, bits)
    return jnp.where(magnitude > 0x7F800000, splat(NOT_FOUND), key)


def first_best(found: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """The largest key and the lowest index that has it, over vectors of keys and indices, as scalars."""
    best = largest(found[0][0])
    for keys, _ in found[1:]:
        best = jnp.maximum(best, largest(keys))
    index = jnp.int32(NOT_FOUND)
    for keys, indices in found:
        index = jnp.minimum(index, smallest(jnp.where(keys == best, indices, NOT_FOUND)))
    return best, index


def part_start(part: jax.Array, width: int, size: int) -> jax.Array:
    """Where a part begins; the last one reaches back, which changes no winner."""
    return jnp.minimum(part * size, width - size)


def merged(keys: Ref, indices: Ref, num_parts: int) -> jax.Array:
    """The index of a row's maximum from its parts' winners `[num_parts]`."""
    return first_best([(piece.load(keys), piece.load(indices)) for piece in pieces(num_parts, jnp.int32, num_parts)])[1]


assert SMALLEST_PART % WARPGROUP == 0
