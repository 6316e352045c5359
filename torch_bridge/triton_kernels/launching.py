"""One description of a launch, two launchers: torch and JAX run the same kernel with the same specialisation.

A kernel takes only arrays and constexprs. Every number is a constexpr, because the launchers treat other integers
differently: torch looks at their divisibility, jax-triton does not. Arguments are the inputs, then the outputs; an array that
is updated in place is both.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax
    import torch


def _let_the_interpreter_loop() -> None:
    """Loop bounds that a kernel computes: Triton 3.6's interpreter keeps every number as an array of one element, which NumPy
    2.5 no longer turns into an integer."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index


if os.environ.get("TRITON_INTERPRET") == "1":
    _let_the_interpreter_loop()


class Launch(NamedTuple):
    """How a kernel is launched."""

    grid: tuple[int, ...]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


def power_of_2(size: int, at_most: int | None = None) -> int:
    """The smallest power of two that holds `size` elements (at least 1), but no more than `at_most`."""
    power = 1 << max(size - 1, 0).bit_length()
    return power if at_most is None else min(power, at_most)


def strides(array: Any) -> tuple[int, ...]:
    """Element strides of a torch tensor; a JAX array is row-major."""
    if hasattr(array, "stride"):
        return tuple(array.stride())
    return tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape)))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as JAX hands it to a kernel: row-major and at a multiple of 16 bytes, copied if it is not.

    Both launchers then specialise a kernel alike: strides and alignment change the generated code, and with it, in an op that
    computes, perhaps the bits.
    """
    import torch

    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _options(launch: Launch) -> dict[str, Any]:
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}


def launch_in_torch(kernel: Any, arrays: Sequence[torch.Tensor], launch: Launch) -> None:
    """Launch on the first tensor's device and its current stream; an empty grid launches nothing."""
    import torch

    if 0 in launch.grid:
        return
    device = arrays[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[launch.grid](*arrays, **launch.constexprs, **_options(launch))


def launch_in_jax(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[Any],
    launch: Launch,
    *,
    in_place: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Call the kernel inside a JAX computation.

    Args:
        outputs: shape and dtype of each; their memory is uninitialised.
        in_place: input number -> output number that shares its buffer. XLA copies the input first if anybody still needs it.
    """
    return jax_triton().triton_call(
        *inputs,
        kernel=kernel,
        out_shape=list(outputs),
        grid=launch.grid,
        **_options(launch),
        input_output_aliases=in_place or {},
        **launch.constexprs,
    )


@functools.cache
def jax_triton() -> Any:
    """The jax_triton module, or ImportError on a JAX without GPU support.

    Importing version 0.3.1 sets TRITON_CACHE_DIR to the empty string, after which torch's Triton finds no cache folder.
    """
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton
