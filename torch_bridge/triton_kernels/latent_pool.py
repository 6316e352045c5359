"""Writing latents into the paged pool from a kernel: who writes where two land on one place, and moving the bits."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops.checks import dtype_name

from .launching import power_of_2, strides


@triton.jit
def as_bits(pointer):  # type: ignore[no-untyped-def]
    """A pointer to 2- or 4-byte floats as one to integers of that width: a move must not touch a NaN or a subnormal."""
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        return pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def places(pages, offsets, NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A token's place `page*P + offset` as int64; -1 where it lies outside the pool."""
    inside = (pages >= 0) & (pages < NUM_PAGES) & (offsets >= 0) & (offsets < PAGE_SIZE)
    return tl.where(inside, pages.to(tl.int64) * PAGE_SIZE + offsets, -1)


@triton.jit
def listed_places(  # type: ignore[no-untyped-def]
    token, num_tokens, pages, offsets, NUM_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """The places of these tokens, given as pages `[N]` and offsets `[N]`; -1 for one that writes nothing."""
    page = tl.load(pages + token, mask=token < num_tokens, other=-1)
    return places(page, tl.load(offsets + token, mask=token < num_tokens, other=0), NUM_PAGES, PAGE_SIZE)


@triton.jit
def program_tokens(NUM_TOKENS: tl.constexpr, TOKENS: tl.constexpr, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of this program. The CPU interpreter writes one after the other; BACKWARDS there, so that a token which
    fails to leave its place to a later one shows, as it may on a GPU."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if BACKWARDS:
        token = tl.where(token < NUM_TOKENS, NUM_TOKENS - 1 - token, token)
    return token


@triton.jit
def overwrites(places, tokens, later_places, later_tokens):  # type: ignore[no-untyped-def]
    """For each token 1 if one of the later tokens has its place, else 0."""
    same = (places[:, None] == later_places[None, :]) & (tokens[:, None] < later_tokens[None, :])
    return tl.max(same.to(tl.int32), axis=1)


@triton.jit
def times_zero(bits, SIGN: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of `x * 0`: a zero with x's sign where x is finite, NaN where it is infinite or NaN."""
    return tl.where((bits & EXPONENT) == EXPONENT, NAN, bits & SIGN).to(bits.dtype)


@triton.jit
def pool_rows(  # type: ignore[no-untyped-def]
    pool, places, layer, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr,
):  # fmt: skip
    """Pointers to one layer's latents at these places, as integers. A place of -1 must be masked."""
    page, offset = places // PAGE_SIZE, places % PAGE_SIZE
    return as_bits(pool) + page * PAGE_STRIDE + offset * OFFSET_STRIDE + layer.to(tl.int64) * LAYER_STRIDE


def pool_constexprs(pool: Any, layout: str) -> dict[str, int]:
    """What a kernel knows about a pool `[L, pages, P, D]` (or `[pages, L, P, D]`), contiguous or not."""
    layer_axis, page_axis = (0, 1) if layout == "layer_major" else (1, 0)
    stride = strides(pool)
    return {
        "NUM_PAGES": pool.shape[page_axis],
        "PAGE_SIZE": pool.shape[2],
        "WIDTH": pool.shape[3],
        "BLOCK_WIDTH": power_of_2(pool.shape[3]),
        "PAGE_STRIDE": stride[page_axis],
        "OFFSET_STRIDE": stride[2],
        "LAYER_STRIDE": stride[layer_axis],
        "POOL_STRIDE": stride[3],
    }


def float_constexprs(array: Any) -> dict[str, int]:
    """The bit patterns of a float dtype that `times_zero` needs, as signed integers of its width."""
    return {
        "float32": {"SIGN": -(2**31), "EXPONENT": 0x7F800000, "NAN": 0x7FC00000},
        "bfloat16": {"SIGN": -(2**15), "EXPONENT": 0x7F80, "NAN": 0x7FC0},
        "float16": {"SIGN": -(2**15), "EXPONENT": 0x7C00, "NAN": 0x7E00},
    }[dtype_name(array)]


def num_layers(pool: Any, layout: str) -> int:
    return pool.shape[0] if layout == "layer_major" else pool.shape[1]


def token_constexprs(num_tokens: int) -> dict[str, Any]:
    """A step's few tokens get a program each; a prompt's share one, so that the search for later writes is shared too.

    So do any on the CPU interpreter, which runs one program after the other.
    """
    interpreted = bool(triton.knobs.runtime.interpret)
    return {
        "NUM_TOKENS": num_tokens,
        "TOKENS": 16 if num_tokens > 512 or interpreted else 1,
        "LATER": power_of_2(num_tokens, at_most=256),
        "BACKWARDS": interpreted,
    }
