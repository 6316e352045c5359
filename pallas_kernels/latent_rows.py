"""Moving rows of latents into the paged pool: the part that all stores share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdspark.ops import BackendUnavailable

from .launch import WARPGROUP, Piece, Ref, largest, pieces

LAYERS_IN_FLIGHT = 8
"""Layers whose rows a program holds in registers at once."""

SCAN_COLUMNS = 1024
"""Destinations that a program compares with its own at a time."""


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The static sizes of a latent pool in either layout."""

    num_layers: int
    num_pages: int
    page_size: int
    width: int
    layout: str

    @classmethod
    def of(cls, pool: jax.Array, layout: str) -> PoolShape:
        first, second, page_size, width = pool.shape
        num_layers, num_pages = (first, second) if layout == "layer_major" else (second, first)
        return cls(num_layers, num_pages, page_size, width, layout)

    def row(self, pool: Ref, layer: int | jax.Array, page: jax.Array, offset: jax.Array) -> Ref:
        """The ref of one latent."""
        return pool.at[layer, page, offset] if self.layout == "layer_major" else pool.at[page, layer, offset]

    def holds(self, page: jax.Array, offset: jax.Array | int = 0) -> jax.Array:
        """Whether (page, offset) is a place of the pool."""
        return (page >= 0) & (page < self.num_pages) & (offset >= 0) & (offset < self.page_size)


Splat = Callable[[Any, Any], jax.Array]
"""`splat(value, dtype)`: a constant or scalar as a vector like another one, see `Piece.splat`."""


def times_zero(x: jax.Array, splat: Splat) -> jax.Array:
    """`x * 0` in integers: a zero with x's sign where x is finite, NaN where its exponent is all ones."""
    bits_type = {2: jnp.int16, 4: jnp.int32}[x.dtype.itemsize]
    exponent, quiet = {
        "float32": (0x7F800000, 0x7FC00000),
        "bfloat16": (0x7F80, 0x7FC0),
        "float16": (0x7C00, 0x7E00),
    }[x.dtype.name]
    bits = lax.bitcast_convert_type(x, bits_type)
    exponents = splat(exponent, bits_type)
    sign = bits & splat(jnp.iinfo(bits_type).min, bits_type)
    zero_or_nan = jnp.where((bits & exponents) == exponents, splat(quiet, bits_type), sign)
    return lax.bitcast_convert_type(zero_or_nan, x.dtype)


def move_rows(
    pool: Ref,
    shape: PoolShape,
    layers: tuple[int, ...],
    source: Callable[[int], Ref],
    page: jax.Array,
    offset: jax.Array,
    writes: jax.Array,
    accepted: jax.Array | None = None,
) -> None:
    """Copy one token's latent of every layer to (page, offset) if `writes`, bit for bit.

    Args:
        source: the ref of a layer's row.
        accepted: where it is false the row's product with zero is written instead.
    """
    if shape.width == 1 and accepted is not None:
        raise BackendUnavailable(
            "store: backend='pallas' needs latents of at least two numbers, since Mosaic GPU has no bit patterns of"
            f" scalars; the pool is {list(pool.shape)}. backend='xla' runs everywhere"
        )
    row_pieces = pieces(shape.width, pool.dtype, shape.width)

    def load(layers: tuple[int, ...]) -> list[jax.Array]:
        return [piece.load(source(layer)) for layer in layers for piece in row_pieces]

    def store(layers: tuple[int, ...], loaded: list[jax.Array]) -> None:
        targets = [(piece, layer) for layer in layers for piece in row_pieces]
        for (piece, layer), values in zip(targets, loaded):
            kept = values if accepted is None else keep_or_zero(values, accepted, piece.splat)
            piece.store(shape.row(pool, layer, page, offset), kept)

    # the first layers' loads run while the destination is being found; all loads come before the stores they could alias
    first = load(layers[:LAYERS_IN_FLIGHT])

    @pl.when(writes)
    def _write() -> None:
        store(layers[:LAYERS_IN_FLIGHT], first)
        for start in range(LAYERS_IN_FLIGHT, len(layers), LAYERS_IN_FLIGHT):
            group = layers[start : start + LAYERS_IN_FLIGHT]
            store(group, load(group))


def keep_or_zero(values: jax.Array, accepted: jax.Array, splat: Splat) -> jax.Array:
    """The values if `accepted`, else their product with zero."""
    bits_type = {2: jnp.int16, 4: jnp.int32}[values.dtype.itemsize]
    bits = lax.bitcast_convert_type(values, bits_type)
    rejected = lax.bitcast_convert_type(times_zero(values, splat), bits_type)
    return lax.bitcast_convert_type(jnp.where(splat(accepted, jnp.bool_), bits, rejected), values.dtype)


def overwritten(index: jax.Array, num_entries: int, *destination: tuple[Ref, jax.Array]) -> jax.Array:
    """Whether a later entry than `index` has the same destination.

    Args:
        destination: pairs of a `[num_entries]` int32 ref and this entry's value in it; all must agree.
    """
    hit = jnp.int32(0)
    if num_entries <= SCAN_COLUMNS:
        for piece in pieces(num_entries, jnp.int32):
            hit = jnp.maximum(hit, _any_later(piece, 0, index, destination))
        return hit > 0
    # chunks from the one that holds this entry to the last, which reaches back
    width = SCAN_COLUMNS
    piece = Piece(0, width, 4 if num_entries % 4 == 0 else 1, 0)

    def scan(chunk: jax.Array, hit: jax.Array) -> jax.Array:
        start = jnp.minimum(chunk * width, num_entries - width)
        return jnp.maximum(hit, _any_later(piece, start, index, destination))

    return lax.fori_loop(index // width, -(-num_entries // width), scan, hit) > 0


def _any_later(piece: Piece, start: Any, index: jax.Array, destination: tuple[tuple[Ref, jax.Array], ...]) -> jax.Array:
    same = piece.positions() + start > index
    for ref, value in destination:
        same &= piece.load(ref, start) == value
    return largest(jnp.where(same, piece.splat(1, jnp.int32), piece.splat(0, jnp.int32)))


assert SCAN_COLUMNS % WARPGROUP == 0
