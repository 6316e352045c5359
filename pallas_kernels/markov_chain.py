from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .grid_barrier import grid_barrier, launch_semaphore, multiprocessors
from .launch import CORE, SWIZZLED, TILE, WARP, WARPS, Ref, ceil_div, interpreter, launch, pieces, store, struct, why_no_wgmma
from .row_argmax import NOT_FOUND, first_best, merged, order_keys, ordered, part_start, part_width

REQUESTS = 8
"""Columns of such a product, and the most requests of the one launch: with 32 the launches per slot are faster."""

SHARED_BYTES = 223 * 1024
"""The most shared memory for a program's rows of `w2`, their product and its operand; little else is in the 227 KB."""

OPERAND = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, 2 * WARP), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""`[8, r]` with pairs of neighbours in a thread."""


@jax.jit
def markov_chain(base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[B, K, V]`, `[B]`, `[V1, r]`, `[V, r]` -> corrected_logits `[B, K, V]` float32, tokens `[B, K]`.

    One launch for all slots where `w2` fits into the GPU's shared memory and there are few requests, else two per slot.
    """
    num_gen, K, _ = base_logits.shape
    base_logits = base_logits.astype(jnp.float32)
    if num_gen == 0 or K == 0:
        return base_logits, jnp.zeros((num_gen, K), jnp.int32)
    programs = multiprocessors() if jax.default_backend() == "gpu" else 1
    if fits_one_launch(num_gen, w2, programs):
        return one_launch(base_logits, anchor, w1, w2, programs)
    return launches_per_slot(base_logits, anchor, w1, w2)


def fits_one_launch(num_gen: int, w2: jax.Array, programs: int) -> bool:
    """Whether `one_launch` takes these operands."""
    vocab_size, rank = w2.shape
    rows = rows_per_program(vocab_size, programs)
    return (
        why_no_wgmma() is None
        and num_gen <= REQUESTS
        and w2.dtype in (jnp.bfloat16, jnp.float16)
        and rank % 64 == 0
        and vocab_size % CORE == 0
        and vocab_size >= TILE
        and (rows * (rank + REQUESTS) + REQUESTS * rank) * w2.dtype.itemsize <= SHARED_BYTES
    )


def rows_per_program(vocab_size: int, programs: int) -> int:
    """Rows of `w2` that a program of `one_launch` owns: whole tiles, or all of them if it is alone."""
    return min(vocab_size, TILE * ceil_div(ceil_div(vocab_size, programs), TILE))


def one_launch(
    base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array, programs: int
) -> tuple[jax.Array, jax.Array]:
    """The whole chain on at most `programs` programs, which keep their rows of `w2` in shared memory over all slots.

    In each slot a program corrects its part of the vocabulary and publishes the winner of each request there; behind a
    barrier all of them find the winner of the winners, the next slot's token.
    """
    B, K, vocab_size = base_logits.shape
    num_tokens, rank = w1.shape
    rows = rows_per_program(vocab_size, programs)
    programs = ceil_div(vocab_size, rows)
    padded = WARP * ceil_div(programs, WARP)
    # the requests that are compared at once, a row of a matrix each; the last ones may be there twice
    together = min(WARPS, 1 << (B.bit_length() - 1))
    parts = [pl.ds(min(b, B - together), together) for b in range(0, B, together)] if together > 1 else [0]
    layout = row_layout(together)
    on_gpu = jax.default_backend() == "gpu"

    def load(ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def splat(value: int, shape: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast(jnp.int32(value), shape), layout)

    def positions(shape: tuple[int, ...]) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, len(shape) - 1, layout=layout)

    def best(keys: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each row the largest key, and the lowest of the indices that have it."""
        top = jnp.max(keys, axis=-1)
        is_top = keys == lax.broadcast_in_dim(top, keys.shape, tuple(range(top.ndim)))
        return top, jnp.min(jnp.where(is_top, indices, NOT_FOUND), axis=-1)

    def markov_chain_kernel(
        base: Ref, anchor: Ref, w1: Ref, w2: Ref, corrected: Ref, tokens: Ref, keys: Ref, indices: Ref,
        w2_smem: Ref, operand_smem: Ref, bias_smem: Ref, tokens_smem: Ref, copied: Ref,
    ) -> None:  # fmt: skip
        program = lax.axis_index("program")
        start = part_start(program, vocab_size, rows)
        mine = pl.ds(start, rows)
        semaphore = launch_semaphore() if on_gpu else None
        plgpu.copy_gmem_to_smem(w2.at[mine], w2_smem, copied)

        def embedding(token: jax.Array) -> jax.Array:
            return plgpu.load(w1.at[token], layout=OPERAND.reduce(0), optimized=False)

        def slot(i: jax.Array, previous: list[jax.Array]) -> list[jax.Array]:
            logits = [load(base.at[part, i, mine]) for part in parts]
            operand_smem[...] = stack([embedding(token) for token in previous])
            plgpu.commit_smem()
            multiply(w2_smem, operand_smem, bias_smem)
            plgpu.commit_smem()
            for part, x in zip(parts, logits):
                x = x + load(bias_smem.at[part]).astype(jnp.float32)
                store(corrected.at[part, i, mine], x)
                order = ordered(x, functools.partial(splat, shape=x.shape))
                key, index = best(order, positions(x.shape) + start)
                store(keys.at[i, part, program], key)
                store(indices.at[i, part, program], index)
            if on_gpu:
                grid_barrier(semaphore, i, programs)
            winners = []
            for part in parts:
                order, index = load(keys.at[i, part]), load(indices.at[i, part])
                there = positions(order.shape) < programs
                _, winner = best(jnp.where(there, order, -NOT_FOUND), jnp.where(there, index, NOT_FOUND))
                winners.append(winner)

            @pl.when(program == 0)
            def _write() -> None:
                for part, winner in zip(parts, winners):
                    store(tokens.at[part, i], winner)

            if together == 1:
                return winners
            for part, winner in zip(parts, winners):
                tokens_smem[part] = winner
            plgpu.commit_smem()
            return [tokens_smem[b] for b in range(B)]

        first = [jnp.clip(anchor[b], 0, num_tokens - 1) for b in range(B)]
        plgpu.barrier_wait(copied)
        lax.fori_loop(0, K, slot, first)

    corrected, tokens, _, _ = plgpu.kernel(
        markov_chain_kernel,
        out_type=(
            struct((B, K, vocab_size), jnp.float32),
            struct((B, K), jnp.int32),
            struct((K, B, padded), jnp.int32),
            struct((K, B, padded), jnp.int32),
        ),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(
            plgpu.SMEM((rows, rank), w2.dtype, transforms=SWIZZLED),
            plgpu.SMEM((REQUESTS, rank), w2.dtype, transforms=SWIZZLED),
            plgpu.SMEM((REQUESTS, rows), w2.dtype),
            plgpu.SMEM((B,), jnp.int32),
            plgpu.Barrier(),
        ),
        # what other threads read is behind a `commit_smem` or the grid barrier
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter(),
    )(base_logits, anchor, w1, w2)
    return corrected, tokens


def row_layout(rows: int) -> Any:
    """`[rows, columns]` of 2 or 4 rows, or `[columns]` for 1: each row in the lanes of a warp, again in warps left over."""
    if rows == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((WARP,), (1,))), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1
        )
    repeated = (plgpu.Replicated(WARPS // rows),) if rows < WARPS else ()
    tiling = plgpu.Tiling(((rows, WARP), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3, *repeated), lane_dims=(-2,), vector_dim=-1)


def stack(rows: list[jax.Array]) -> jax.Array:
    """`[8, r]` of up to 8 rows `[r]`; the first one again where there are fewer."""
    shape = (REQUESTS, rows[0].shape[0])
    number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=OPERAND)
    first, *others = [plgpu.layout_cast(lax.broadcast_in_dim(row, shape, (1,)), OPERAND) for row in rows]
    stacked = first
    for b, row in enumerate(others, 1):
        stacked = jnp.where(number == b, row, stacked)
    return stacked


def multiply(weights: Ref, embeddings: Ref, bias: Ref) -> None:
    """`[rows, r]` times `[8, r]` into `[8, rows]`, summed in fp32. The interpreter has no tensor cores."""
    rows = weights.shape[0]
    if jax.default_backend() != "gpu":
        bias[...] = jnp.dot(embeddings[...].astype(jnp.float32), weights[...].astype(jnp.float32).T).astype(bias.dtype)
        return
    tiles = [pl.ds(first, TILE) for first in range(0, rows, TILE)]

    def sums(accumulators: list[Ref]) -> list[jax.Array]:
        for accumulator, tile in zip(accumulators, tiles):
            plgpu.wgmma(accumulator, weights.at[tile], embeddings.transpose((1, 0)))
        return [accumulator[...] for accumulator in accumulators]

    for tile, product in zip(tiles, pl.run_scoped(sums, [plgpu.ACC((TILE, REQUESTS), jnp.float32) for _ in tiles])):
        store(bias.at[:, tile].transpose((1, 0)), product.astype(bias.dtype))


def launches_per_slot(base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two launches per slot around XLA's product: the sum, with the winners of each row's parts; then their merge, which
    also fetches the next slot's row of `w1`.
    """
    num_gen, K, vocab_size = base_logits.shape
    num_tokens, rank = w1.shape
    size = part_width(num_gen, vocab_size)
    num_parts = ceil_div(vocab_size, size)
    part_pieces = pieces(size, jnp.float32, vocab_size, size)
    rank_pieces = pieces(rank, w1.dtype, rank)

    def add_bias_kernel(base: Ref, bias: Ref, corrected: Ref, keys: Ref, indices: Ref, *, i: int) -> None:
        b, part = lax.axis_index("request"), lax.axis_index("part")
        start = part_start(part, vocab_size, size)
        found = []
        for piece in part_pieces:
            logits = piece.load(base.at[b, i], start) + piece.load(bias.at[b], start).astype(jnp.float32)
            piece.store(corrected.at[b, i], logits, start)
            found.append((order_keys(logits, piece), piece.positions() + start))
        keys[b, part], indices[b, part] = first_best(found)

    def next_row_kernel(keys: Ref, indices: Ref, w1: Ref, tokens: Ref, next_rows: Ref) -> None:
        b = lax.axis_index("request")
        token = merged(keys.at[b], indices.at[b], num_parts)
        tokens[b] = token
        for piece in rank_pieces:
            piece.store(next_rows.at[b], piece.load(w1.at[jnp.minimum(token, num_tokens - 1)]))

    corrected = jax.empty_ref(struct(base_logits.shape, jnp.float32))  # each launch fills one slot of it
    rows = w1[jnp.clip(anchor, 0, num_tokens - 1)]
    tokens = []
    for i in range(K):
        # the barrier keeps the product's rounding to the weights' dtype, as in the plain definition
        bias = lax.optimization_barrier(rows @ w2.T)
        keys, indices = launch(
            functools.partial(add_bias_kernel, i=i),
            out_type=(struct((num_gen, num_parts), jnp.int32), struct((num_gen, num_parts), jnp.int32)),
            grid={"request": num_gen, "part": num_parts},
        )(base_logits, bias, corrected)
        token, rows = launch(
            next_row_kernel,
            out_type=(struct((num_gen,), jnp.int32), struct((num_gen, rank), w1.dtype)),
            grid={"request": num_gen},
        )(keys, indices, w1)
        tokens.append(token)
    return jax.freeze(corrected), jnp.stack(tokens, axis=1)
