"""What a layer's attention takes, in one launch: `q_nope @ k_b` of each head beside its rotated `q_rope`, and the latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdspark.ops.rope import at_positions

from .launch import CORE, SHARED_BYTES, SWIZZLED, TILE, Ref, interpreter, pieces, struct, zero
from .norm_rope import negative_zero, norm_rope_pairs, split_pairs
from .streamed_product import ROWS_BY_COLUMNS


def most_nope(rows: int) -> int:
    """The most of `nope` that the programs have shared memory for beside so many rows."""
    swap, rope, staged, transposed = 2 * TILE * TILE, 2 * rows * TILE, 2 * rows * TILE, 4 * rows * TILE
    return (SHARED_BYTES - swap - rope - staged - transposed) // (2 * TILE + 2 * rows) // TILE * TILE


@functools.partial(jax.jit, static_argnames=("eps",))
def attention_operands(
    q: jax.Array,
    compressed: jax.Array,
    positions: jax.Array,
    k_b: jax.Array,
    kv_a_norm: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """The queries `[num_rows, heads, rank + rope]` and, as `norm_rope` makes them, the latents `[num_rows, rank + rope]`.

    A program multiplies 64 columns of one head, summed in fp32 and rounded, or rotates 64 numbers of one in fp32, or makes a
    latent. Swapping the numbers of a pair of queries is a product as well, with a matrix of 1 and -1: a thread has no other
    way to its neighbour's.

    Args:
        q: `[rows, heads * (nope + rope)]`, rows a multiple of 8; those from `num_rows` on are ignored.
        compressed: `[rows, rank + rope]`.
        positions: `[num_rows]` int32.
        k_b: `[heads, nope, rank]`; nope a multiple of 64, rank of 128, rope of 64 and below 256.
        kv_a_norm: `[rank]`.
        cos, sin: `[positions, rope/2]` fp32.
    """
    rows, num_rows, (heads, nope, rank), rope = q.shape[0], positions.shape[0], k_b.shape, 2 * cos.shape[1]
    head_dim, tiles, parts = nope + rope, rank // TILE, (rank + rope) // TILE
    table_length = cos.shape[0]
    (row_piece,) = pieces(TILE, q.dtype, TILE)
    swap = np.zeros((TILE, TILE), np.float32)
    swap[range(1, TILE, 2), range(0, TILE, 2)] = -1  # (re, im) becomes (-im, re)
    swap[range(0, TILE, 2), range(1, TILE, 2)] = 1
    padded_positions = jnp.pad(positions, (0, rows - num_rows))
    row_cos, row_sin = (jnp.repeat(at_positions(table, padded_positions), 2, axis=1) for table in (cos, sin))

    def attention_operands_kernel(
        q: Ref, k_b: Ref, swap: Ref, row_cos: Ref, row_sin: Ref, compressed: Ref, positions: Ref, kv_a_norm: Ref,
        cos: Ref, sin: Ref, negative_zero: Ref, queries: Ref, latents: Ref,
        k_smem: Ref, q_smem: Ref, swap_smem: Ref, rope_smem: Ref, transposed: Ref, staged: Ref, ready: Ref,
    ) -> None:  # fmt: skip
        program = lax.axis_index("program")
        head, part = lax.div(program, jnp.int32(parts)), lax.rem(program, jnp.int32(parts))
        start = pl.multiple_of(head * head_dim, 64)
        columns = pl.ds(pl.multiple_of(part * TILE, TILE), TILE)

        def store(values_of: Callable[[pl.Slice], jax.Array]) -> None:
            for start in range(0, rows, TILE):  # for the sake of registers
                some = pl.ds(start, min(rows - start, TILE))
                staged[some] = values_of(some).astype(staged.dtype)
            plgpu.commit_smem()
            if num_rows <= CORE or num_rows % CORE == 0:  # which the copy engine can cut into runs of 8 rows
                # rows behind the last are not written
                plgpu.copy_smem_to_gmem(staged, queries.at[pl.ds(zero(program), rows), head, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return

            def store_rows(first: jax.Array | int, count: int) -> None:
                for m in range(count):
                    row_piece.store(queries.at[first + m, head, columns], row_piece.load(staged.at[first + m]))

            whole = num_rows // CORE
            lax.fori_loop(0, whole, lambda i, _: store_rows(i * CORE, CORE), None)
            store_rows(whole * CORE, num_rows % CORE)

        @pl.when((head < heads) & (part < tiles))
        def _absorb() -> None:
            plgpu.copy_gmem_to_smem(k_b.at[head, :, columns], k_smem, ready)
            plgpu.copy_gmem_to_smem(q.at[:, pl.ds(start, nope)], q_smem, ready)
            plgpu.barrier_wait(ready)
            multiply(transposed, k_smem, q_smem)
            store(lambda some: columns_of(transposed, some))

        @pl.when((head < heads) & (part >= tiles))
        def _rotate() -> None:
            first = pl.multiple_of((part - tiles) * TILE, TILE)
            plgpu.copy_gmem_to_smem(swap, swap_smem, ready)
            plgpu.copy_gmem_to_smem(q.at[:, pl.ds(start + nope + first, TILE)], rope_smem, ready)

            def factors(some: pl.Slice) -> list[jax.Array]:
                return [
                    plgpu.load(ref.at[some, place], layout=ROWS_BY_COLUMNS, optimized=False).astype(jnp.float32)
                    for ref, place in (
                        (row_cos, pl.ds(first, TILE)), (row_sin, pl.ds(first, TILE)), (q, pl.ds(start + nope + first, TILE))
                    )
                ]  # fmt: skip

            ahead = factors(pl.ds(0, min(rows, TILE)))  # on their way while the product is made
            plgpu.barrier_wait(ready)
            multiply(transposed, swap_smem, rope_smem)

            def rotated(some: pl.Slice) -> jax.Array:
                c, s, numbers = factors(some) if some.start else ahead
                return numbers * c + columns_of(transposed, some) * s

            store(rotated)

        @pl.when(head >= heads)
        def _latent() -> None:
            i = program - heads * parts
            position = jnp.clip(positions[i], 0, table_length - 1)
            cos_sin = cos.at[position], sin.at[position]
            for of_latent in norm_rope_pairs(compressed.at[i], kv_a_norm, cos_sin, rank, eps, negative_zero[0]):
                of_latent.store(latents.at[i], of_latent.values)

    def smem(*shape: int) -> Any:
        return plgpu.SMEM(shape, q.dtype, transforms=SWIZZLED)

    queries, latents = plgpu.kernel(
        attention_operands_kernel,
        out_type=(
            struct((num_rows, heads, rank + rope), q.dtype),
            struct((num_rows, (rank + rope) // 2, 2), compressed.dtype),
        ),
        grid=(heads * parts + num_rows,),
        grid_names=("program",),
        scratch_types=(
            smem(nope, TILE), smem(rows, nope), smem(TILE, TILE), smem(rows, TILE),
            plgpu.SMEM((TILE, rows), jnp.float32), plgpu.SMEM((rows, TILE), q.dtype), plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter(),
    )(
        q, k_b, jnp.asarray(swap, q.dtype), row_cos, row_sin,
        split_pairs(compressed), positions, split_pairs(kv_a_norm), cos, sin, negative_zero(),
    )  # fmt: skip
    return queries, latents.reshape(num_rows, rank + rope)


def multiply(transposed: Ref, weights: Ref, x: Ref) -> None:
    """`(x @ weights).T` in fp32: `[rows, K]`, `[K, 64]`. The interpreter has no tensor cores."""
    if jax.default_backend() != "gpu":
        transposed[...] = (x[...].astype(jnp.float32) @ weights[...].astype(jnp.float32)).T
    else:

        def accumulate(accumulator: Ref) -> jax.Array:
            plgpu.wgmma(accumulator, weights.transpose((1, 0)), x.transpose((1, 0)))
            return accumulator[...]

        transposed[...] = pl.run_scoped(accumulate, plgpu.ACC((TILE, x.shape[0]), jnp.float32))
    plgpu.commit_smem()


def columns_of(transposed: Ref, some: pl.Slice) -> jax.Array:
    """These columns as rows."""
    return plgpu.load(transposed.transpose((1, 0)).at[some], layout=ROWS_BY_COLUMNS, optimized=False)
