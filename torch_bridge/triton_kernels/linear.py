"""Matrix products in one order of summation, whatever the batch: a row's bits depend on that row and the weight alone.

Tiles have one size for every number of rows, and how K is split among programs follows from the weight's shape. Each split adds
its tiles in order into one fp32 accumulator; a second launch adds the splits in order. So padding, another batch size or dummy
rows beside it change no bit of a row, and nothing depends on which program comes first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts
from jdspark.ops.checks import expect_same_dtype

from .launching import Launch, launch_in_jax, launch_in_torch, pinned, power_of_2

if TYPE_CHECKING:
    import torch

PROGRAMS = 264
"""How many programs a product is split into if its K allows: two for each of an H200's processors."""


@triton.jit
def add_residual(product, at, residual, out, mask, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round a product to the output's dtype, then add the residual and round again, and store it."""
    rounded = product.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        addend = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = (addend + rounded.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=mask)


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    x,  # [M, HEADS, K]
    weight,  # by its strides
    residual,  # [M, HEADS, N]; not read without HAS_RESIDUAL
    out,  # [M, HEADS, N]; [SPLITS, M, HEADS, N] fp32 with more than one split
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row tile, column tile, (head, split)): TILES tiles of K."""
    head, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + (rows.to(tl.int64) * HEADS + head)[:, None] * K
    weight_columns = weight + head.to(tl.int64) * N * K + columns.to(tl.int64)[None, :] * COLUMN_STRIDE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(TILES):
        k = (split * TILES + tile) * BLOCK_K + tl.arange(0, BLOCK_K)
        left = tl.load(x_rows + k[None, :], mask=(rows < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(weight_columns + k[:, None] * K_STRIDE, mask=(columns < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = (rows.to(tl.int64) * HEADS + head)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * M * HEADS * N + at, total, mask=inside)
    else:
        add_residual(total, at, residual, out, inside, HAS_RESIDUAL)


@triton.jit
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    partial,  # [SPLITS, SIZE] fp32
    residual,  # [SIZE]; not read without HAS_RESIDUAL
    out,  # [SIZE]
    SIZE: tl.constexpr, SPLITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program: LANES outputs, the splits' sums added first to last."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = at < SIZE
    total = tl.load(partial + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * SIZE + at, mask=inside, other=0.0)
    add_residual(total, at, residual, out, inside, HAS_RESIDUAL)


def product_launches(
    M: int, heads: int, N: int, K: int, strides: tuple[int, int], itemsize: int, residual: bool
) -> list[Launch]:
    """The launches of a product: one, or with a K split among programs two.

    Args:
        strides: the weight's, from one column of the result to the next and along K.
    """
    block_m, block_n, block_k, warps, stages = (64, 64, 128, 4, 3) if itemsize == 2 else (16, 64, 32, 4, 3)
    block_n, block_k = max(16, power_of_2(N, at_most=block_n)), max(16, power_of_2(K, at_most=block_k))
    columns, k_tiles = triton.cdiv(N, block_n), triton.cdiv(K, block_k)
    most = max(1, min(PROGRAMS // (columns * heads), k_tiles // 2))
    splits = max(parts for parts in range(1, most + 1) if k_tiles % parts == 0)
    shape = {"M": M, "N": N, "K": K, "HEADS": heads, "COLUMN_STRIDE": strides[0], "K_STRIDE": strides[1]}
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    split = {"SPLITS": splits, "TILES": k_tiles // splits, "HAS_RESIDUAL": residual and splits == 1}
    launches = [Launch((triton.cdiv(M, block_m), columns, heads * splits), shape | split | blocks, warps, stages)]
    if splits > 1:
        size = M * heads * N
        lanes = power_of_2(size, at_most=512)
        merge = {"SIZE": size, "SPLITS": splits, "HAS_RESIDUAL": residual, "LANES": lanes}
        launches.append(Launch((triton.cdiv(size, lanes),), merge))
    return launches


def product_in_torch(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, N: int, strides: tuple[int, int]
) -> torch.Tensor:
    """The launches for `x [M, heads, K]` -> `[M, heads, N]`."""
    import torch

    M, heads, K = x.shape
    x, weight = pinned(x), pinned(weight)
    addend = x if residual is None else pinned(residual)
    out = torch.empty((M, heads, N), dtype=x.dtype, device=x.device)
    first, *merge = product_launches(M, heads, N, K, strides, x.element_size(), residual is not None)
    if not merge:
        launch_in_torch(product_kernel, [x, weight, addend, out], first)
        return out
    partial = torch.empty((first.constexprs["SPLITS"], M, heads, N), dtype=torch.float32, device=x.device)
    launch_in_torch(product_kernel, [x, weight, addend, partial], first)
    launch_in_torch(merge_splits_kernel, [partial, addend, out], merge[0])
    return out


def product_in_jax(x: jax.Array, weight: jax.Array, residual: jax.Array | None, N: int, strides: tuple[int, int]) -> jax.Array:
    """The launches for `x [M, heads, K]` -> `[M, heads, N]`."""
    M, heads, K = x.shape
    out = jax.ShapeDtypeStruct((M, heads, N), x.dtype)
    if out.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    addend = x if residual is None else residual
    first, *merge = product_launches(M, heads, N, K, strides, x.dtype.itemsize, residual is not None)
    if not merge:
        return launch_in_jax(product_kernel, [x, weight, addend], [out], first)[0]
    sums = jax.ShapeDtypeStruct((first.constexprs["SPLITS"], M, heads, N), jnp.float32)
    (partial,) = launch_in_jax(product_kernel, [x, weight, addend], [sums], first)
    return launch_in_jax(merge_splits_kernel, [partial, addend], [out], merge[0])[0]


def linear(x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T`, `residual +` that, in one or two launches; see `jdspark.ops.linear`."""
    contracts.linear(x, weight, residual)
    if residual is not None:
        expect_same_dtype("linear", "residual", residual, weight, "weight")

    N, K = weight.shape
    rows = x.to(weight.dtype).reshape(-1, 1, K)
    return product_in_torch(rows, weight, residual, N, (K, 1)).reshape(*x.shape[:-1], N)


def linear_in_jax(x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
    """See `jdspark.ops.linear`."""
    if residual is not None:
        expect_same_dtype("linear", "residual", residual, weight, "weight")
        residual = jnp.asarray(residual)
    N, K = weight.shape
    rows = jnp.asarray(x).astype(weight.dtype).reshape(math.prod(x.shape[:-1]), 1, K)
    return product_in_jax(rows, jnp.asarray(weight), residual, N, (K, 1)).reshape(*x.shape[:-1], N)
