"""The attention's query from the heads' queries: `q_nope @ k_b` of each head beside its rotated `q_rope`, in one launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import SWIZZLED, TILE, Ref, interpreter, pieces, struct
from .streamed_product import ROWS_BY_COLUMNS


@functools.partial(jax.jit, static_argnames=("num_rows",))
def absorbed_query(q: jax.Array, k_b: jax.Array, cos: jax.Array, sin: jax.Array, *, num_rows: int) -> jax.Array:
    """`[rows, heads * (nope + rope)]`, `[heads, nope, rank]` -> `[num_rows, heads, rank + rope]`.

    A program multiplies 64 columns of one head, summed in fp32 and rounded, or rotates 64 numbers of one in fp32. Swapping
    the numbers of a pair is a product as well, with a matrix of 1 and -1: a thread has no other way to its neighbour's.

    Args:
        q: rows a multiple of 8; those from `num_rows` on are ignored.
        k_b: nope and rank multiples of 64.
        cos, sin: `[num_rows, rope/2]` fp32, at each row's position; rope a multiple of 64.
    """
    rows, (heads, nope, rank), rope = q.shape[0], k_b.shape, 2 * cos.shape[1]
    head_dim, tiles = nope + rope, rank // TILE
    (row_piece,) = pieces(TILE, jnp.float32, TILE)
    swap = np.zeros((TILE, TILE), np.float32)
    swap[range(1, TILE, 2), range(0, TILE, 2)] = -1  # (re, im) becomes (-im, re)
    swap[range(0, TILE, 2), range(1, TILE, 2)] = 1

    def absorb_query(
        q: Ref, k_b: Ref, swap: Ref, cos: Ref, sin: Ref, out: Ref,
        k_smem: Ref, q_smem: Ref, swap_smem: Ref, rope_smem: Ref, sums: Ref, transposed: Ref, ready: Ref,
    ) -> None:  # fmt: skip
        head, tile = lax.axis_index("head"), lax.axis_index("tile")
        start = pl.multiple_of(head * head_dim, 64)
        columns = pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)

        @pl.when(tile < tiles)
        def _absorb() -> None:
            plgpu.copy_gmem_to_smem(k_b.at[head, :, columns], k_smem, ready)
            plgpu.copy_gmem_to_smem(q.at[:, pl.ds(start, nope)], q_smem, ready)
            plgpu.barrier_wait(ready)
            store_product(sums, transposed, k_smem, q_smem)
            for m in range(num_rows):
                row_piece.store(out.at[m, head, columns], row_piece.load(sums.at[m]).astype(out.dtype))

        @pl.when(tile >= tiles)
        def _rotate() -> None:
            place = pl.ds(start + nope + (tile - tiles) * TILE, TILE)
            angles = pl.ds((tile - tiles) * TILE, TILE)
            plgpu.copy_gmem_to_smem(swap, swap_smem, ready)
            plgpu.copy_gmem_to_smem(q.at[:, place], rope_smem, ready)
            plgpu.barrier_wait(ready)
            store_product(sums, transposed, swap_smem, rope_smem)
            for m in range(num_rows):
                numbers, swapped = row_piece.load(q.at[m, place]).astype(jnp.float32), row_piece.load(sums.at[m])
                c, s = row_piece.load(cos.at[m, angles]), row_piece.load(sin.at[m, angles])
                row_piece.store(out.at[m, head, columns], (numbers * c + swapped * s).astype(out.dtype))

    def smem(*shape: int) -> Any:
        return plgpu.SMEM(shape, q.dtype, transforms=SWIZZLED)

    return plgpu.kernel(
        absorb_query,
        out_type=struct((num_rows, heads, rank + rope), q.dtype),
        grid=(heads, tiles + rope // TILE),
        grid_names=("head", "tile"),
        scratch_types=(
            smem(nope, TILE), smem(rows, nope), smem(TILE, TILE), smem(rows, TILE),
            plgpu.SMEM((rows, TILE), jnp.float32), plgpu.SMEM((TILE, rows), jnp.float32), plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter(),
    )(q, k_b, jnp.asarray(swap, q.dtype), jnp.repeat(cos, 2, axis=1), jnp.repeat(sin, 2, axis=1))  # fmt: skip


def store_product(sums: Ref, transposed: Ref, weights: Ref, x: Ref) -> None:
    """`sums = x @ weights` in fp32: `[rows, K]`, `[K, 64]`. The interpreter has no tensor cores."""
    if jax.default_backend() == "gpu":

        def multiply(accumulator: Ref) -> jax.Array:
            plgpu.wgmma(accumulator, weights.transpose((1, 0)), x.transpose((1, 0)))
            return accumulator[...]

        transposed[...] = pl.run_scoped(multiply, plgpu.ACC((TILE, x.shape[0]), jnp.float32))
        plgpu.commit_smem()
        sums[...] = plgpu.load(transposed.transpose((1, 0)), layout=ROWS_BY_COLUMNS, optimized=False)
    else:
        sums[...] = x[...].astype(jnp.float32) @ weights[...].astype(jnp.float32)
    plgpu.commit_smem()
