from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import WARPGROUP, Piece, Ref, launch, pieces, store, struct


@functools.partial(jax.jit, static_argnames=("eps",))
def norm_rope(
    latents: jax.Array, positions: jax.Array, kv_a_norm: jax.Array, cos: jax.Array, sin: jax.Array, *, eps: float
) -> jax.Array:
    """RMSNorm of the first `kv_lora_rank` numbers of `latents [N, L, D]` and RoPE of the adjacent pairs behind them.

    One launch, one program per latent. All arithmetic is fp32 without fused multiply-adds, cast once at the end. The sum
    of squares has a fixed order. Number i is lane `i % 128` of chunk `i // 128`, with zeros up to a power of two of
    chunks; neighbouring chunks are added until one is left, then neighbouring lanes. The mean is that sum times
    `1/kv_lora_rank`, rounded to fp32.
    """
    num_tokens, (_, num_layers, width) = positions.shape[0], latents.shape  # latents may end with rows that are padding
    rank = kv_a_norm.shape[1]
    if latents.size == 0:
        return latents
    table_length = cos.shape[0]
    in_pairs = goes_in_pairs(width, rank)  # other widths go one number at a time
    split = split_pairs if in_pairs else (lambda x: x)
    rotary = () if width == rank else (cos, sin)

    def norm_rope_kernel(latents: Ref, positions: Ref, weights: Ref, *refs: Ref) -> None:
        *rotary, negative_zero, out = refs
        z = negative_zero[0]
        i, layer = lax.axis_index("token"), lax.axis_index("layer")
        row, weight, target = latents.at[i, layer], weights.at[layer], out.at[i, layer]
        position = jnp.clip(positions[i], 0, table_length - 1)
        cos_sin = (rotary[0].at[position], rotary[1].at[position]) if rotary else None
        if in_pairs:
            for part in norm_rope_pairs(row, weight, cos_sin, rank, eps, z):
                part.store(target, part.values)
        else:
            norm_scalars(row, weight, target, rank, eps, z)
            if cos_sin is not None:
                rope_scalars(row, *cos_sin, target, rank, z)

    return launch(
        norm_rope_kernel,
        out_type=struct((num_tokens, *split(latents).shape[1:]), latents.dtype),
        grid={"layer": num_layers, "token": num_tokens},
    )(split(latents), positions, split(kv_a_norm), *rotary, negative_zero()).reshape(num_tokens, num_layers, width)


def goes_in_pairs(width: int, rank: int) -> bool:
    """Whether a latent of this width is computed as `[D/2, 2]`."""
    return rank > 0 and rank % WARPGROUP == 0 and width % 2 == 0 and width - rank < 2 * WARPGROUP


def split_pairs(x: jax.Array) -> jax.Array:
    """`[..., D]` -> `[..., D/2, 2]`: to XLA the same buffer; a kernel cannot load every other number of `[D]`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)


def negative_zero() -> jax.Array:
    """The operand that `rounded` adds."""
    return jnp.full(1, -0.0, jnp.float32)


def rounded(product: jax.Array, z: jax.Array) -> jax.Array:
    """An fp32 product, rounded: adding `z`, -0.0, changes no number, and what is added to it later cannot be fused into it.

    Mosaic GPU contracts a product and a sum to one fused multiply-add, and the assembler does so across an optimization
    barrier. The -0.0 comes from memory, so that no compiler knows it.
    """
    return product + z


def inverse_rms(sum_of_squares: jax.Array, rank: int, eps: float, z: jax.Array) -> jax.Array:
    return lax.rsqrt(rounded(sum_of_squares * jnp.float32(1 / rank), z) + jnp.float32(eps))


def sum_neighbours(values: list[jax.Array]) -> jax.Array:
    """Add neighbours until one value is left; a missing one counts as zero, which leaves a square as it is."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


class Part(NamedTuple):
    """Some numbers of a finished latent, in its dtype."""

    values: jax.Array
    store: Callable[[Ref, jax.Array], None]
    """Writes values at their place in a latent seen as `[D/2, 2]`."""
    splat: Callable[[Any, Any], jax.Array]
    """A constant or scalar as a vector like the values."""


def norm_rope_pairs(row: Ref, weight: Ref, cos_sin: tuple[Ref, Ref] | None, rank: int, eps: float, z: jax.Array) -> list[Part]:
    """The latent of a row, both seen as `[D/2, 2]`; without rope `cos_sin` is None."""
    normed = normed_pairs(row, weight, rank, eps, z)
    return normed if cos_sin is None else normed + rotated_pairs(row, *cos_sin, rank, z)


def normed_pairs(row: Ref, weight: Ref, rank: int, eps: float, z: jax.Array) -> list[Part]:
    """RMSNorm of a row: a chunk of 128 numbers is `[64, 2]`, one number per thread."""
    shape = (WARPGROUP // 2, 2)
    chunks = [pl.ds(start // 2, shape[0]) for start in range(0, rank, WARPGROUP)]
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)

    def load(ref: Ref, chunk: pl.Slice) -> jax.Array:
        return plgpu.load(ref.at[chunk], layout=layout, optimized=False).astype(jnp.float32)

    def splat(value: Any, dtype: Any) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast(jnp.asarray(value, dtype), shape), layout)

    def part(chunk: pl.Slice, numbers: jax.Array, w: jax.Array) -> Part:
        def store_chunk(target: Ref, values: jax.Array) -> None:
            store(target.at[chunk], values)

        return Part((w * (numbers * scale)).astype(row.dtype), store_chunk, splat)

    x = [load(row, chunk) for chunk in chunks]
    weights = [load(weight, chunk) for chunk in chunks]
    # the sum over a warpgroup's threads adds neighbours, at distance 1, 2, 4, ... 64
    total = jnp.sum(sum_neighbours([rounded(numbers * numbers, z) for numbers in x]))
    scale = inverse_rms(total, rank, eps, z)
    return [part(*of_chunk) for of_chunk in zip(chunks, x, weights)]


def rotated_pairs(row: Ref, cos: Ref, sin: Ref, rank: int, z: jax.Array) -> list[Part]:
    """RoPE of a row, the first numbers of the pairs and the second ones."""

    def part(piece: Piece, k: int, rotated: jax.Array) -> Part:
        def store(target: Ref, values: jax.Array) -> None:
            piece.store(target.at[:, k], values, rank // 2)

        return Part(rotated.astype(row.dtype), store, piece.splat)

    parts = []
    for piece in pieces(cos.shape[0], cos.dtype, 1):
        re, im = (piece.load(row.at[:, k], rank // 2).astype(jnp.float32) for k in (0, 1))
        c, s = piece.load(cos), piece.load(sin)
        parts.append(part(piece, 0, rounded(re * c, z) - rounded(im * s, z)))
        parts.append(part(piece, 1, rounded(re * s, z) + rounded(im * c, z)))
    return parts


def norm_scalars(row: Ref, weight: Ref, target: Ref, rank: int, eps: float, z: jax.Array) -> None:
    """RMSNorm of a row of any width, one number at a time."""
    x = [row[i].astype(jnp.float32) for i in range(rank)]
    lanes = [
        sum_neighbours([rounded(number * number, z) for number in x[lane::WARPGROUP]]) for lane in range(min(rank, WARPGROUP))
    ]
    scale = inverse_rms(sum_neighbours(lanes), rank, eps, z) if rank else z
    for i, number in enumerate(x):
        target[i] = (weight[i].astype(jnp.float32) * (number * scale)).astype(target.dtype)


def rope_scalars(row: Ref, cos: Ref, sin: Ref, target: Ref, rank: int, z: jax.Array) -> None:
    """RoPE of a row of any width, one pair at a time."""
    for i in range(cos.shape[0]):
        re, im = row[rank + 2 * i].astype(jnp.float32), row[rank + 2 * i + 1].astype(jnp.float32)
        target[rank + 2 * i] = (rounded(re * cos[i], z) - rounded(im * sin[i], z)).astype(target.dtype)
        target[rank + 2 * i + 1] = (rounded(re * sin[i], z) + rounded(im * cos[i], z)).astype(target.dtype)
