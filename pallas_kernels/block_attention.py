"""Block attention over the paged context in two launches: a split over the context, then a merge.

The split is a persistent grid. The tiles of 64 keys of all requests form one line, and every program takes an equal run of
it, however different the lengths are: one or more *pieces*, each inside one request. A program is four warpgroups: one copies
pages into shared memory, one computes scores and softmax, and two hold half of the output columns each and multiply weights
and values. A key's latent is its value as well, so that a tile is copied once. How far the sums so far shrink is known ahead
of the weights, and applied by then. The merge adds up each request's pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdspark.ops.backends import BackendUnavailable
from jdspark.ops.block_attention import AttentionShape
from jdspark.ops.checks import Layout, pool_dims

from .discard import discard
from .launch import (
    CORE,
    MULTIPROCESSORS,
    SWIZZLED,
    TILE,
    WARP,
    WARPGROUP,
    WARPS,
    Ref,
    ceil_div,
    interpreter,
    store,
    struct,
    why_no_wgmma,
    zero,
)

ROWS, KEYS = TILE, TILE
"""Query rows of a program, and keys of a tile."""

STAGES = 2
"""Tiles in shared memory at a time: with the queries, all of it."""

MAX_REQUESTS, MAX_RANK, MAX_WIDTH = 128, 512, 576

PRODUCT_COLUMNS = 128
"""The most columns of one product with the values: 64 registers of the 128 that an instruction of 512 threads can name."""

LOWEST = -1e30
"""The running maximum before the first key: finite, so that the difference of two is a number."""

MERGED_AT_ONCE, MERGERS = 9, 4
"""Pieces that a warpgroup of the merge loads together, unless the most warpgroups that a program has there are too few."""

COPIER, SCORER, VALUES = 0, 1, (2, 3)
"""Warpgroups of a split program."""

REGISTERS = {COPIER: 40, SCORER: 136, VALUES[0]: 168, VALUES[1]: 168}
"""Registers per thread: 512 threads share 65,536, and half of a 64 x 512 accumulator takes 128 of each."""

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=512,
    # all that threads of one warpgroup hand each other goes through `commit_smem` or a barrier at which each of them arrives
    unsafe_no_auto_barriers=True,
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tiles `low..high-1` of the `count` tiles of request b; `step` is how many tiles the program has taken before."""

    b: jax.Array
    tokens: jax.Array
    """Context of the request."""
    count: jax.Array
    low: jax.Array
    high: jax.Array
    step: jax.Array


def unsupported(shape: AttentionShape) -> str | None:
    """None if the kernels can run this attention here, else the reason."""
    if jax.default_backend() != "gpu":
        return "off a GPU its warpgroups run as threads of an interpreter, and on few cores they can wait for ever"
    if reason := why_no_wgmma():
        return reason
    if shape.dtypes != ("bfloat16",):
        return f"its kernels multiply bfloat16, the operands are {', '.join(shape.dtypes)}"
    if shape.page_size < 32 or (shape.page_size % KEYS and KEYS % shape.page_size):
        return f"page_size is {shape.page_size}, its kernels copy pages of 32 tokens or a multiple of {KEYS}"
    if shape.kv_lora_rank % 128 or not 0 < shape.kv_lora_rank <= MAX_RANK:
        return f"kv_lora_rank is {shape.kv_lora_rank}, its kernels need a multiple of 128 up to {MAX_RANK}"
    if shape.width % 64 or shape.width > MAX_WIDTH:
        return f"the latent width D is {shape.width}, its kernels need a multiple of 64 up to {MAX_WIDTH}"
    if shape.block_size > KEYS:
        return f"block_size is {shape.block_size}, its kernels take blocks of up to {KEYS} tokens"
    if shape.B > MAX_REQUESTS:
        return f"B is {shape.B}, its kernels take up to {MAX_REQUESTS} requests"
    return None


def block_attention(
    query: jax.Array,
    block_latents: jax.Array,
    pool: jax.Array,
    page_tables: jax.Array,
    advertised: jax.Array,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout = "layer_major",
) -> jax.Array:
    """`jdspark.ops.block_attention` without a dense copy of the context.

    Scores, softmax and sums are fp32; the weights are rounded to bf16 for their product with the values, and so are the
    partial sums of a piece. No output is further from the exact one than 2^-7 of the largest: the tests' bound, against fp64.

    Raises:
        BackendUnavailable: `unsupported` has a reason for these shapes or dtypes, or `scale` is not above 0.
    """
    shape = AttentionShape.of(query, block_latents, pool, kv_lora_rank, layout)
    # the maximum is taken before the scaling, which keeps it only if that is above 0
    if reason := unsupported(shape) or (None if scale > 0 else f"scale is {scale}, its kernels need one above 0"):
        raise BackendUnavailable(f"block_attention: backend='pallas' is not available: {reason}; backend='xla' runs everywhere")
    row_blocks = ceil_div(shape.block_size * query.shape[2], ROWS)
    return attend(
        query, block_latents, pool, page_tables, advertised,
        layer=layer, scale=scale, kv_lora_rank=kv_lora_rank, layout=layout, programs=max(MULTIPROCESSORS // row_blocks, 1),
    )  # fmt: skip


def attend(
    query: jax.Array,
    block_latents: jax.Array,
    pool: jax.Array,
    page_tables: jax.Array,
    advertised: jax.Array,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout,
    programs: int,
) -> jax.Array:
    """The two launches, unchecked, with `programs` programs per 64 query rows."""
    num_layers, num_pages, page_size, width = pool_dims("block_attention", pool, layout)
    B, block_size, heads = query.shape[:3]
    if query.size == 0:
        return query[..., :kv_lora_rank]
    page_stride, layer_stride = (1, num_pages) if layout == "layer_major" else (num_layers, 1)
    pieces = split(
        padded_rows(query.reshape(B, block_size * heads, width)),
        padded_rows(block_latents),
        pool.reshape(-1, width),
        page_tables,
        advertised,
        # an operand, so that all layers of a step share one compiled kernel
        jnp.full(1, layer * layer_stride * page_size, jnp.int32),
        block_size=block_size,
        page_size=page_size,
        num_pages=num_pages,
        page_rows=page_stride * page_size,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        programs=programs,
    )
    merged = merge(*pieces, num_rows=block_size * heads, programs=programs, dtype=query.dtype)
    return merged.reshape(*query.shape[:3], kv_lora_rank)


def padded_rows(x: jax.Array) -> jax.Array:
    """`[B, rows, D]` with rows up to 8 or a multiple of 8: what the copy engine can cut into runs of 8 rows.

    It fills rows behind the last one with zeros, so that nothing else needs padding.
    """
    rows = x.shape[1]
    return x if rows <= CORE or rows % CORE == 0 else jnp.pad(x, ((0, 0), (0, -rows % CORE), (0, 0)))


def num_tiles(advertised: Any, limit: int) -> Any:
    """Tiles of a request: those of its context, at most `limit` tokens, and one for the block itself."""
    return lax.div(jnp.clip(advertised, 0, limit) + jnp.int32(KEYS - 1), jnp.int32(KEYS)) + jnp.int32(1)


def first_tile(program: Any, tiles: Any, programs: int) -> Any:
    """The first of `tiles` tiles that a program takes; the programs' shares differ by one tile at most."""
    share, longer = lax.div(tiles, jnp.int32(programs)), lax.rem(tiles, jnp.int32(programs))
    return program * share + jnp.minimum(program, longer)


def summed(values: list[Any]) -> Any:
    return functools.reduce(operator.add, values)


def requests_of(counts: list[Any], program: Any, programs: int) -> tuple[Any, Any, Any, Any, Any]:
    """Where a program's run of tiles lies.

    Args:
        counts: tiles of each request.

    Returns:
        the first tile of the run and the one behind its last, the first request with a tile in it and the one behind the
        last, and the first request's first tile.
    """
    tiles = summed(counts)
    begin, end = first_tile(program, tiles, programs), first_tile(program + 1, tiles, programs)
    one, zero = jnp.int32(1), jnp.int32(0)
    start = first = behind = first_start = zero
    for count in counts:
        stop = start + count
        first = first + jnp.where(stop <= begin, one, zero)
        first_start = jnp.where(stop <= begin, stop, first_start)
        behind = behind + jnp.where(start < end, one, zero)
        start = stop
    return begin, end, first, behind, first_start


@functools.partial(
    jax.jit, static_argnames=("block_size", "page_size", "num_pages", "page_rows", "scale", "kv_lora_rank", "programs")
)
def split(
    query: jax.Array,
    block_latents: jax.Array,
    rows: jax.Array,
    page_tables: jax.Array,
    advertised: jax.Array,
    layer_row: jax.Array,
    *,
    block_size: int,
    page_size: int,
    num_pages: int,
    page_rows: int,
    scale: float,
    kv_lora_rank: int,
    programs: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of every request's pieces.

    Args:
        query: `[B, rows, D]`, see `padded_rows`; block_latents: `[B, block, D]` likewise.
        rows: the pool as `[L*pages*P, D]`; token o of page p is row `layer_row[0] + p*page_rows + o`.

    Returns:
        `[row_blocks, programs + B - 1, rows, kv_lora_rank]` with up to 64 rows, sums of values by weights
        `2^(score - maximum)`, and `[row_blocks, 2, 64, programs + B - 1 or more]`, maxima and sums of these weights, scores in
        units of log 2. A program's piece of request b is at index `program + b`: where the run of programs meets the run of
        requests, one of the two always moves on. Entries without a piece are not written. Then `[row_blocks, B, 2]` int32,
        the first and the last program with a piece of a request.
    """
    B, num_rows, width = query.shape
    max_blocks = page_tables.shape[1]
    limit = max_blocks * page_size
    row_blocks = ceil_div(num_rows, ROWS)
    copies, copied = max(KEYS // page_size, 1), min(KEYS, page_size)
    sum_rows = min(ceil_div(num_rows, CORE) * CORE, ROWS)
    half = kv_lora_rank // len(VALUES)
    product_columns = math.gcd(half, PRODUCT_COLUMNS)

    def attention_split(
        query: Ref, block: Ref, rows: Ref, tables: Ref, advertised: Ref, layer_row: Ref, sums: Ref, stats: Ref,
        bounds: Ref, q_smem: Ref, kv_smem: Ref, weights_smem: Ref, decay_smem: Ref,
        q_full: Ref, q_free: Ref, kv_full: Ref, kv_free: Ref, decay_full: Ref, weights_full: Ref, weights_free: Ref,
    ) -> None:  # fmt: skip
        program, row_block, warpgroup = (lax.axis_index(axis) for axis in ("program", "row_block", "warpgroup"))
        first_row = layer_row[0]
        counts = [num_tiles(advertised[b], limit) for b in range(B)]
        begin, end, first, behind, first_start = requests_of(counts, program, programs)

        def walk(work: Callable[[Piece], None]) -> None:
            def visit(b: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                start, step = carry
                tokens = jnp.clip(advertised[b], 0, limit)
                count = num_tiles(tokens, limit)
                low, high = jnp.maximum(begin - start, 0), jnp.minimum(end - start, count)
                work(Piece(b, tokens, count, low, high, step))
                return start + count, step + high - low

            lax.fori_loop(first, behind, visit, (first_start, jnp.int32(0)))

        def pages(piece: Piece, t: jax.Array) -> list[jax.Array]:
            """Pages of context tile t."""
            column = lax.div(t * KEYS, jnp.int32(page_size))
            return [tables[piece.b, jnp.minimum(column + i, max_blocks - 1)] for i in range(copies)]

        def readable(piece: Piece, t: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
            """Whether these pages of context tile t are some that the request can read."""
            start = lax.div(t * KEYS, jnp.int32(page_size)) * page_size
            return [(p >= 0) & (p < num_pages) & (start + i * page_size < piece.tokens) for i, p in enumerate(pages)]

        def num_keys(piece: Piece, t: jax.Array) -> jax.Array:
            """Keys of tile t: the block's in the last one."""
            return jnp.where(t == piece.count - 1, jnp.int32(block_size), jnp.minimum(piece.tokens - t * KEYS, KEYS))

        def stage(piece: Piece, t: jax.Array) -> jax.Array:
            return lax.rem(piece.step + t - piece.low, jnp.int32(STAGES))

        @pl.when(warpgroup == COPIER)
        def _copy() -> None:
            plgpu.set_max_registers(REGISTERS[COPIER], action="decrease")

            def work(piece: Piece) -> None:
                b, last = piece.b, piece.count - 1
                found = pages(piece, piece.low)
                plgpu.barrier_wait(q_free)
                for i in range(width // 64):
                    part = query.at[b, pl.ds(row_block * ROWS, ROWS), pl.ds(i * 64, 64)]
                    plgpu.copy_gmem_to_smem(part, q_smem.at[i], q_full)

                def tile(t: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
                    slot = stage(piece, t)
                    following = pages(piece, t + 1)  # on their way while this tile waits for its place
                    plgpu.barrier_wait(kv_free.at[slot])

                    # the copy engine fills what lies behind the pool, or behind the block, with zeros
                    @pl.when(t < last)
                    def _context() -> None:
                        offset = first_row + lax.rem(t * KEYS, jnp.int32(page_size))
                        for i, (number, there) in enumerate(zip(found, readable(piece, t, found))):
                            row = pl.multiple_of(jnp.where(there, offset + number * page_rows, rows.shape[0]), CORE)
                            keys = kv_smem.at[slot, pl.ds(i * copied, copied)]
                            plgpu.copy_gmem_to_smem(rows.at[pl.ds(row, copied)], keys, kv_full.at[slot])

                    @pl.when(t == last)
                    def _block() -> None:
                        for i in range(copies):
                            keys = kv_smem.at[slot, pl.ds(i * copied, copied)]
                            plgpu.copy_gmem_to_smem(block.at[b, pl.ds(zero(t) + i * copied, copied)], keys, kv_full.at[slot])

                    return following

                lax.fori_loop(piece.low, piece.high, tile, found)

            walk(work)
            plgpu.barrier_wait(q_free)
            for slot in range(STAGES):
                plgpu.barrier_wait(kv_free.at[slot])

        @pl.when(warpgroup == SCORER)
        def _score() -> None:
            plgpu.set_max_registers(REGISTERS[SCORER], action="increase")
            plgpu.barrier_arrive(q_free)
            in_log2 = jnp.float32(scale * math.log2(math.e))

            def masked(scores: jax.Array, from_key: jax.Array, to_key: jax.Array) -> jax.Array:
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=plgpu.Layout.WGMMA)
                return jnp.where((key >= from_key) & (key < to_key), scores, -jnp.inf)

            def work(piece: Piece) -> None:
                b, last = piece.b, piece.count - 1
                plgpu.barrier_wait(q_full)

                def tile(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    maximum, total = carry
                    slot = stage(piece, t)
                    there = [found | (t == last) for found in readable(piece, t, pages(piece, t))]
                    keys = num_keys(piece, t)
                    # the readable keys are a range: of one page, or of two
                    from_key = jnp.where(there[0], 0, jnp.int32(copied))
                    to_key = jnp.where(there[-1], keys, jnp.minimum(keys, KEYS - copied))
                    plgpu.barrier_wait(kv_full.at[slot])
                    scores = score_product(q_smem, kv_smem.at[slot])
                    whole = (from_key == 0) & (to_key == KEYS)
                    scores = lax.cond(whole, lambda scores, *_: scores, masked, scores, from_key, to_key)
                    risen = jnp.maximum(maximum, scores.max(axis=1) * in_log2)
                    decay = jnp.exp2(maximum - risen)
                    decay_smem[slot] = decay
                    plgpu.barrier_arrive(decay_full.at[slot])
                    weights = jnp.exp2(scores * in_log2 - lax.broadcast_in_dim(risen, scores.shape, [0]))
                    plgpu.barrier_wait(weights_free)
                    weights_smem[...] = weights.astype(weights_smem.dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(weights_full)
                    return risen, total * decay + weights.sum(axis=1)

                layout = plgpu.Layout.WGMMA.reduce(1)
                start = (splat(LOWEST, (ROWS,), layout), splat(0, (ROWS,), layout))
                maximum, total = lax.fori_loop(piece.low, piece.high, tile, start)
                plgpu.barrier_arrive(q_free)
                store(stats.at[row_block, 0, :, program + b], maximum)
                store(stats.at[row_block, 1, :, program + b], total)

                @pl.when(piece.low == 0)
                def _first() -> None:
                    bounds[row_block, b, 0] = program

                @pl.when(piece.high == piece.count)
                def _last() -> None:
                    bounds[row_block, b, 1] = program

            walk(work)
            plgpu.barrier_wait(weights_free)

        @pl.when(warpgroup >= VALUES[0])
        def _sum_values() -> None:
            plgpu.set_max_registers(REGISTERS[VALUES[0]], action="increase")
            first_column = (warpgroup - VALUES[0]) * half
            plgpu.barrier_arrive(q_free)
            plgpu.barrier_arrive(weights_free)
            for slot in range(STAGES):
                plgpu.barrier_arrive(kv_free.at[slot])

            def columns(start: Any, size: int) -> pl.Slice:
                return pl.ds(pl.multiple_of(first_column + start, 64), size)

            def clear(slot: jax.Array, keys: jax.Array) -> None:
                """Zero the values behind the last key: their weights are 0, but 0 times a NaN is a NaN."""

                def chunk(i: jax.Array, _: None) -> None:
                    values = kv_smem.at[slot, :, columns(i * 64, 64)]
                    key = plgpu.broadcasted_iota(jnp.int32, (KEYS, 64), 0, layout=plgpu.Layout.WGMMA)
                    found = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
                    values[...] = jnp.where(key < keys, found, jnp.zeros((), found.dtype))

                lax.fori_loop(0, half // 64, chunk, None)
                plgpu.commit_smem()

            def leave(piece: Piece, column: int, total: jax.Array) -> None:
                """The finished sums of the columns from this one on go out through the place of the queries."""
                for start in range(column, column + total.shape[1], 64):
                    staged = q_smem.at[(warpgroup - VALUES[0]) * (half // 64) + start // 64]
                    staged[...] = total[:, start - column : start - column + 64].astype(q_smem.dtype)
                    plgpu.commit_smem()
                    # rows behind the last are not written
                    place = sums.at[row_block, program + piece.b, pl.ds(zero(program), ROWS), columns(start, 64)]
                    plgpu.copy_smem_to_gmem(staged, place)

            def work(piece: Piece) -> None:
                def tile(t: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
                    slot = stage(piece, t)
                    keys = num_keys(piece, t)
                    plgpu.barrier_wait(kv_full.at[slot])
                    pl.when((t < piece.count - 1) & (keys < KEYS))(lambda: clear(slot, keys))
                    plgpu.barrier_wait(decay_full.at[slot])
                    decay = plgpu.load(decay_smem.at[slot], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                    totals = [total * lax.broadcast_in_dim(decay, total.shape, [0]) for total in totals]
                    plgpu.barrier_wait(weights_full)
                    for i, column in enumerate(range(0, half, product_columns)):
                        totals[i] = add_product(totals[i], weights_smem, kv_smem.at[slot, :, columns(column, product_columns)])
                        # on their way while the next are multiplied; the queries have done their duty, all scores are there
                        pl.when(t == piece.high - 1)(functools.partial(leave, piece, column, totals[i]))
                    plgpu.barrier_arrive(weights_free)
                    plgpu.barrier_arrive(kv_free.at[slot])
                    return totals

                start = [splat(0, (ROWS, product_columns), plgpu.Layout.WGMMA)] * (half // product_columns)
                lax.fori_loop(piece.low, piece.high, tile, start)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free)

            walk(work)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        attention_split,
        out_type=(
            struct((row_blocks, programs + B - 1, sum_rows, kv_lora_rank), query.dtype),
            struct((row_blocks, 2, ROWS, programs + B - 1 + turns(B, programs)[2]), jnp.float32),
            struct((row_blocks, B, 2), jnp.int32),
        ),
        grid=(row_blocks, programs),
        grid_names=("row_block", "program"),
        num_threads=2 + len(VALUES),
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((width // 64, ROWS, 64), query.dtype, transforms=SWIZZLED),
            plgpu.SMEM((STAGES, KEYS, width), query.dtype, transforms=SWIZZLED),
            plgpu.SMEM((ROWS, KEYS), query.dtype, transforms=SWIZZLED),
            plgpu.SMEM((STAGES, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=width // 64),
            plgpu.Barrier(num_arrivals=1 + len(VALUES)),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=len(VALUES), num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=len(VALUES)),
        ),
        compiler_params=COMPILER_PARAMS,
        interpret=interpreter(),
    )(query, block_latents, rows, page_tables, advertised, layer_row)


def score_product(queries: Ref, keys: Ref) -> jax.Array:
    """Queries `[D/64, 64, 64]` times keys `[64, D]`, as fp32. The interpreter has no tensor cores."""
    parts = [(queries.at[i], keys.at[:, pl.ds(i * 64, 64)]) for i in range(queries.shape[0])]
    if jax.default_backend() != "gpu":
        return summed([jnp.dot(q[...].astype(jnp.float32), k[...].astype(jnp.float32).T) for q, k in parts])

    def multiply(accumulator: Ref) -> jax.Array:
        for q, k in parts:
            plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS), jnp.float32))


def add_product(total: jax.Array, a: Ref, b: Ref) -> jax.Array:
    """`total + a @ b`."""
    if jax.default_backend() != "gpu":
        return total + jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32))
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(total))


def splat(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def turns(B: int, programs: int) -> tuple[int, int, int]:
    """How the merge takes a request's pieces: by how many warpgroups, how many of them each at once, and the most in all."""
    pieces = ceil_div(programs, B) + (B > 1)  # of each request, if they are alike
    warpgroups = min(pl.next_power_of_2(ceil_div(pieces, MERGED_AT_ONCE)), MERGERS)
    at_once = ceil_div(pieces, warpgroups)
    rounds = ceil_div(programs, at_once * warpgroups)
    return warpgroups, at_once, ceil_div(rounds * at_once * warpgroups, WARP) * WARP


@functools.partial(jax.jit, static_argnames=("num_rows", "programs", "dtype"))
def merge(sums: jax.Array, stats: jax.Array, bounds: jax.Array, *, num_rows: int, programs: int, dtype: Any) -> jax.Array:
    """The sum of each request's pieces, scaled to their common maximum and divided by the sum of their weights.

    On a GPU `sums` is undefined afterwards (at a long context 8 MB that would leave the cache while the layer's products read
    their weights), and XLA does not know: nothing else may read it, and no second merge of one split.

    One program per row, or half of it; its warpgroups take the pieces in turns, see `turns`. With few requests each has many
    pieces and there are few programs, so that more warpgroups share them. The pieces' scales are worked out once, in every
    warp, while the sums are on their way: per number there is only a product to add, for instructions are what the merge is
    short of.

    Args:
        sums, stats, bounds: of `split`.

    Returns:
        `[B, num_rows, kv_lora_rank]`
    """
    B, rank = bounds.shape[1], sums.shape[-1]
    warpgroups, at_once, most = turns(B, programs)
    columns = rank // 2 if B <= 4 and rank % (2 * WARPGROUP) == 0 else rank
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=math.gcd(columns // WARPGROUP, 4))
    # every warp holds all of them, so that their maximum and sum are its own affair
    stats_layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WARP,), (1,))), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1
    )

    def attention_merge(sums: Ref, stats: Ref, bounds: Ref, out: Ref, scales_smem: Ref, sums_smem: Ref, ready: Ref) -> None:
        b, row, warpgroup = (lax.axis_index(axis) for axis in ("request", "row", "warpgroup"))
        part = pl.ds(lax.axis_index("columns") * columns, columns)
        row_block, block_row = lax.div(row, jnp.int32(ROWS)), lax.rem(row, jnp.int32(ROWS))
        first, last = bounds[row_block, b, 0], bounds[row_block, b, 1]

        def load(number: Any) -> list[jax.Array]:
            """This warpgroup's next pieces; behind the last that one again, which counts for nothing."""
            start = first + warpgroup + number * (at_once * warpgroups)
            indices = [jnp.minimum(start + i * warpgroups, last) + b for i in range(at_once)]
            return [plgpu.load(sums.at[row_block, i, block_row, part], layout=layout, optimized=False) for i in indices]

        def scaled(number: Any, values: list[jax.Array]) -> jax.Array:
            start = warpgroup + number * (at_once * warpgroups)
            scales = [scales_smem[warpgroup, start + i * warpgroups] for i in range(at_once)]
            return summed([scale * value.astype(jnp.float32) for scale, value in zip(scales, values)])

        # ahead of the sums: their scales are worked out while those are on their way
        maxima, weights = (
            plgpu.load(stats.at[row_block, i, block_row, pl.ds(first + b, most)], layout=stats_layout, optimized=False)
            for i in range(2)
        )
        values = load(0)
        there = plgpu.broadcasted_iota(jnp.int32, (most,), 0, layout=stats_layout) <= last - first
        maxima = jnp.where(there, maxima, LOWEST)
        scales = jnp.exp2(maxima - jnp.max(maxima))
        total = jnp.sum(jnp.where(there, scales * weights, 0))
        scales_smem[warpgroup] = scales / total
        plgpu.commit_smem()
        rounds = lax.div(last - first, jnp.int32(warpgroups * at_once)) + 1
        merged = lax.fori_loop(1, rounds, lambda i, merged: merged + scaled(i, load(i)), scaled(0, values))
        sums_smem[warpgroup] = merged
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        discard(sums.at[row_block, pl.ds(first + b, programs), block_row, part], last - first + 1, warpgroups)

        @pl.when(warpgroup == 0)
        def _finish() -> None:
            parts = [plgpu.load(sums_smem.at[i], layout=layout, optimized=False) for i in range(warpgroups)]
            store(out.at[b, row, part], summed(parts).astype(out.dtype))

    return plgpu.kernel(
        attention_merge,
        out_type=struct((B, num_rows, rank), dtype),
        grid=(rank // columns, num_rows, B),
        grid_names=("columns", "row", "request"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((warpgroups, most), jnp.float32),
            plgpu.SMEM((warpgroups, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
        interpret=interpreter(),
    )(sums, stats, bounds)
