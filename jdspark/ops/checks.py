"""What the host can see of an operand: shapes, dtypes and static numbers. Used by the plain ops and their torch twins."""

from __future__ import annotations

from typing import Any, Literal, get_args

Array = Any
"""A jax.Array, an abstract value of the same shape, or a torch tensor on the torch side."""

Layout = Literal["layer_major", "page_major"]
"""Axis order of the latent pool: `[L, pages, P, D]` or `[pages, L, P, D]`."""

INT32_MAX = 2**31 - 1
FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("integer",)
"""int32; torch tensors may also be int64."""


def dtype_name(array: Any) -> str:
    """`"int32"`, `"bfloat16"`, ... for a NumPy, JAX or torch array."""
    return str(array.dtype).removeprefix("torch.")


def expect(op: str, name: str, array: Any, dims: dict[str, int | None], dtypes: tuple[str, ...] = ()) -> None:
    """Raise unless `array` has these dimensions (name -> size, None for any size) and one of these dtypes.

    Raises TypeError for something that is no array or has another dtype, ValueError for another shape.
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{op}: {name} is a {type(array).__name__}, expected an array of shape [{', '.join(dims)}]")
    shape = tuple(array.shape)
    sizes = tuple(dims.values())
    if len(shape) != len(sizes) or any(want is not None and want != got for want, got in zip(sizes, shape, strict=True)):
        wanted = ", ".join(label if size is None else f"{label}={size}" for label, size in dims.items())
        raise ValueError(f"{op}: {name} has shape {list(shape)}, expected [{wanted}]")
    if dtypes == INTEGERS:
        dtypes = ("int32", "int64") if str(array.dtype).startswith("torch.") else ("int32",)
    if dtypes and dtype_name(array) not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {dtype_name(array)}, expected {' or '.join(dtypes)}; cast it first")


def expect_number(op: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless the static integer `value` lies in `[low, high]`; without `high` it must fit into int32."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {name} is {value!r}, expected a Python integer (it is static)")
    if value < low or value > (INT32_MAX if high is None else high):
        bound = f"at least {low} (and an int32)" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{op}: {name} is {value}, expected {bound}")


def pool_dims(op: str, pool: Any, layout: Layout) -> tuple[int, int, int, int]:
    """`(L, pages, P, D)` of a latent pool in either layout."""
    if layout not in get_args(Layout):
        raise ValueError(f"{op}: layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
    expect(op, "pool", pool, {"L or pages": None, "pages or L": None, "P": None, "D": None}, FLOATS)
    first, second, page_size, width = pool.shape
    return (first, second, page_size, width) if layout == "layer_major" else (second, first, page_size, width)


def expect_same_dtype(op: str, name: str, array: Any, other: Any, other_name: str = "the pool") -> None:
    """Latents are moved into the pool, never converted on the way; the operands of a product have one dtype."""
    if dtype_name(array) != dtype_name(other):
        raise TypeError(f"{op}: {name} has dtype {dtype_name(array)} but {other_name} holds {dtype_name(other)}; cast it first")


def expect_gen_rows(op: str, first_row: int, num_gen: int, block_tables_or_counts: Any, name: str) -> None:
    """The gen requests' rows `first_row .. first_row + B - 1` must exist in the per-row tensor."""
    expect_number(op, "first_row", first_row, 0)
    rows = block_tables_or_counts.shape[0]
    if first_row + num_gen > rows:
        raise ValueError(f"{op}: {name} has {rows} rows, but first_row={first_row} and B={num_gen} need {first_row + num_gen}")
