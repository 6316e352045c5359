"""Carrying arrays between JAX and torch through DLPack, and comparing them bit for bit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

logger = logging.getLogger("torch_bridge")

INT32 = np.iinfo(np.int32)
NEED_X64 = (torch.float64, torch.complex128, torch.uint64)


class BridgeError(ValueError):
    """An array cannot cross between the frameworks as asked; the message says why and what to do."""


def to_torch(jax_array: jax.Array, *, copy: bool = False) -> torch.Tensor:
    """A torch tensor of a JAX array, on the same device.

    Without `copy` both share memory. A JAX array is immutable by contract: never write into the tensor. While it lives,
    JAX cannot donate the array (on a GPU the donating call fails, see `donating`; on a CPU JAX copies in silence), so
    take `copy=True` of anything that a decode step will consume. On a GPU, keep a shared tensor until torch's kernels that
    read it are done: JAX reuses the memory once both are dropped, without waiting for torch's stream.

    Raises:
        BridgeError: the array was donated or deleted, or is spread over several devices.
    """
    if not isinstance(jax_array, jax.Array) or isinstance(jax_array, jax.core.Tracer):
        raise BridgeError(f"to_torch: got a {type(jax_array).__name__}, expected a concrete jax.Array")
    if jax_array.is_deleted():
        raise BridgeError("to_torch: the array was donated or deleted; use the array that call returned")
    if len(jax_array.devices()) > 1:
        raise BridgeError(f"to_torch: the array lives on {len(jax_array.devices())} devices; gather it onto one first")
    jax_array.block_until_ready()  # the producing stream is done before torch's stream reads
    tensor = torch.from_dlpack(jax_array)
    if not copy:
        return tensor
    copied = tensor.clone()
    if copied.is_cuda:
        # JAX may hand the memory to its next kernel as soon as the view is gone, and knows nothing of torch's stream
        torch.cuda.current_stream(copied.device).synchronize()
    return copied


def to_jax(torch_tensor: torch.Tensor, *, copy: bool | None = None) -> jax.Array:
    """A JAX array of a torch tensor, on the same device.

    Integers wider than JAX holds (int64 without x64) are converted to int32 after a range check, a strided tensor is
    laid out contiguously first; both copy. Otherwise memory is shared where alignment allows (`shares_memory` tells).
    JAX takes the array for immutable: do not write into a shared tensor afterwards.

    Args:
        copy: True always copies, False raises where sharing is not possible, None shares if it can.

    Raises:
        BridgeError: a value does not fit into int32, or `copy=False` and the memory cannot be shared.
    """
    if not isinstance(torch_tensor, torch.Tensor):
        raise BridgeError(f"to_jax: got a {type(torch_tensor).__name__}, expected a torch.Tensor")
    # a conjugate or negative view keeps its sign beside the memory, where JAX would not see it
    tensor, why_copied = torch_tensor.detach().resolve_conj().resolve_neg(), None
    if tensor.data_ptr() != torch_tensor.data_ptr():
        why_copied = "the tensor is a conjugate or negative view"
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # torch's producers are done before JAX reads
    if tensor.dtype == torch.int64 and not jax.config.read("jax_enable_x64"):
        if tensor.numel() and (int(tensor.min()) < INT32.min or int(tensor.max()) > INT32.max):
            raise BridgeError(
                f"to_jax: an int64 tensor holds values in [{int(tensor.min())}, {int(tensor.max())}], which int32 cannot"
                " hold; enable jax_enable_x64 or narrow it"
            )
        tensor, why_copied = tensor.to(torch.int32), "int64 became int32 (x64 is off)"
    elif tensor.dtype in NEED_X64 and not jax.config.read("jax_enable_x64"):
        raise BridgeError(f"to_jax: JAX would narrow {tensor.dtype} in silence; enable jax_enable_x64 or cast it")
    if not tensor.is_contiguous():
        tensor, why_copied = tensor.contiguous(), "the tensor is strided"
    if copy is True:
        return jnp.array(jax.dlpack.from_dlpack(tensor), copy=True)
    # JAX imports as a copy, without a word, a CPU buffer that its own allocator would not have aligned like this
    array = jax.dlpack.from_dlpack(tensor)
    if why_copied is None and tensor.numel() and not shares_memory(array, torch_tensor):
        why_copied = "the buffer is not aligned as JAX needs it"
    if why_copied is not None:
        if copy is False:
            raise BridgeError(f"to_jax: cannot share memory, {why_copied}; pass copy=None to accept a copy")
        logger.debug("to_jax copied: %s", why_copied)
    return array


def shares_memory(jax_array: jax.Array, torch_tensor: torch.Tensor) -> bool:
    """Whether a JAX array and a torch tensor begin at the same address."""
    return jax_array.unsafe_buffer_pointer() == torch_tensor.data_ptr()


def donating(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a JAX call that donates, and explain the failure when torch still views a donated buffer (GPU only).

    Raises BridgeError in that case; every other error passes through.
    """
    try:
        return call(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if "external reference" not in str(error):
            raise
        raise BridgeError(
            "a donated JAX buffer is still viewed by a torch tensor, so JAX cannot reuse it: drop the tensor, or take it"
            " with to_torch(array, copy=True)"
        ) from error


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two arrays of either framework differ."""

    equal: bool
    """Same shape and, element by element, the same bits (integers: the same value; NaN equals NaN)."""
    mismatches: int
    """Elements that differ; -1 if the shapes or kinds do not match at all."""
    where: tuple[int, ...] | None = None
    """Index of the first one."""
    detail: str = ""

    def __bool__(self) -> bool:
        return self.equal


def to_numpy(array: Any) -> np.ndarray:
    """The array on the host, of either framework; bf16 keeps its bits as an ml_dtypes array."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()
    return np.asarray(array)


def _same_bits_on_a_gpu(a: Any, b: Any) -> bool:
    """Whether both are there and have the same bits, found without copying them to the host. False may mean anything."""

    def on_gpu(x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.is_cuda
        return isinstance(x, jax.Array) and next(iter(x.devices())).platform == "gpu"

    if not (on_gpu(a) and on_gpu(b)):
        return False
    left, right = (to_torch(x) if isinstance(x, jax.Array) else x.detach() for x in (a, b))
    if left.shape != right.shape or left.dtype != right.dtype or left.is_complex() or not left.numel():
        return False
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


def compare(a: Any, b: Any) -> Comparison:
    """Compare two arrays of JAX, torch or NumPy bit for bit.

    Integers and booleans compare by value, so int32 equals int64. Floats must have one dtype and the same bits, -0.0
    and 0.0 differ; a NaN equals a NaN of any payload and sign.
    """
    if _same_bits_on_a_gpu(a, b):
        return Comparison(True, 0)
    left, right = to_numpy(a), to_numpy(b)
    if left.shape != right.shape:
        return Comparison(False, -1, detail=f"shape {list(left.shape)} against {list(right.shape)}")
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in (left, right)]
    if floats[0] != floats[1] or (floats[0] and left.dtype != right.dtype):
        return Comparison(False, -1, detail=f"dtype {left.dtype} against {right.dtype}")
    if floats[0]:
        bits = np.dtype(f"u{left.dtype.itemsize}")
        same = np.atleast_1d(left).view(bits) == np.atleast_1d(right).view(bits)
        same = same.reshape(left.shape)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            differ = ~(same | (np.isnan(left) & np.isnan(right)))
    else:
        differ = left != right
    count = int(np.count_nonzero(differ))
    if not count:
        return Comparison(True, 0)
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    return Comparison(False, count, where, f"first at {list(where)}: {left[where]} against {right[where]}")


def bitwise_equal(a: Any, b: Any) -> bool:
    """Whether two arrays of either framework, or two pytrees of them, are equal in every bit (see `compare`)."""
    (left, left_tree), (right, right_tree) = jax.tree.flatten(a), jax.tree.flatten(b)
    same_tree = str(left_tree) == str(right_tree) or (isinstance(a, tuple) and isinstance(b, tuple) and len(left) == len(right))
    if not same_tree:  # a named and a plain tuple of the same arrays may still be equal
        return False
    return all(compare(x, y).equal for x, y in zip(left, right, strict=True))


def largest_difference(a: Any, b: Any) -> float:
    """`max|a - b| / max|b|` over two float arrays: the error that a bounded comparison bounds. Infinite where only one
    is finite."""
    left, right = (to_numpy(x).astype(np.float64) for x in (a, b))
    if left.shape != right.shape:
        raise BridgeError(f"largest_difference: shape {list(left.shape)} against {list(right.shape)}")
    if left.size == 0:
        return 0.0
    finite = np.isfinite(left) & np.isfinite(right)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = np.abs(right[finite]).max()
    return float(np.abs(left[finite] - right[finite]).max() / max(scale, np.finfo(np.float64).tiny))
