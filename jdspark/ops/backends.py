"""Finding the kernel of an op for a backend other than plain XLA, and saying why there is none."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax

Backend = Literal["xla", "pallas", "triton"]

PACKAGES = {"pallas": "pallas_kernels", "triton": "torch_bridge.triton_kernels"}
"""Where each backend's kernels are, one module per op."""


class BackendUnavailable(RuntimeError):
    """The requested backend cannot run this op on this machine; the message says why and what to do."""


def check_backend(backend: str, field: str = "backend", *others: str) -> None:
    """Raises ValueError for an unknown name; asks nothing of the machine, so that JAX need not have looked at it yet.

    Args:
        field: whose value it is.
        others: what that may be besides.
    """
    known = (*others, *get_args(Backend))
    if backend not in known:
        raise ValueError(f"{field} is {backend!r}, expected one of {', '.join(known)}")


def why_unavailable(backend: str) -> str | None:
    """None if `backend` can run on this machine, else the reason. Raises ValueError for an unknown name."""
    check_backend(backend)
    if backend == "triton":
        if jax.default_backend() != "gpu":
            return f"Triton kernels inside JAX need an NVIDIA GPU, and JAX runs on {jax.default_backend()} here"
        for package in ("triton", "jax_triton"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (pip install -e '.[gpu]')"
    if backend == "pallas" and jax.default_backend() == "gpu":
        capability = compute_capability()
        if capability is None or capability < 9:
            return f"the kernels are for compute capability 9.0 (Hopper) and newer, this GPU has {capability or 'none'}"
    return None


def compute_capability() -> float | None:
    """Of this machine's GPUs; None for devices that have none, a CPU's or another maker's."""
    try:
        return float(getattr(jax.devices()[0], "compute_capability", ""))
    except ValueError:
        return None


def kernel(op: str, backend: str) -> Callable[..., Any]:
    """The implementation of `op` on `backend`, imported on first use; raises BackendUnavailable with the reason.

    Pallas: `pallas_kernels.<op>.<op>`. Triton: `torch_bridge.triton_kernels.<op>.<op>_in_jax`, the source that torch
    launches, without importing torch.
    """
    reason = why_unavailable(backend)
    if reason is None and not has_kernel(op, backend):
        reason = f"it has no {backend} kernel"
    if reason is not None:
        raise BackendUnavailable(f"{op}: backend={backend!r} is not available: {reason}; backend='xla' runs everywhere")
    return getattr(_module(op, backend), {"pallas": op, "triton": f"{op}_in_jax"}[backend])


def why_unsupported(op: str, backend: str, shape: Any) -> str | None:
    """None if the op's kernel takes operands of this shape, else its reason: its module may have `unsupported(shape)`."""
    check = getattr(_module(op, backend), "unsupported", None)
    return None if check is None else check(shape)


def has_kernel(op: str, backend: str) -> bool:
    """Whether the repository has a kernel of `op` for `backend`, runnable here or not."""
    try:
        return backend != "xla" and importlib.util.find_spec(f"{PACKAGES[backend]}.{op}") is not None
    except ModuleNotFoundError:
        return False


def _module(op: str, backend: str) -> Any:
    return importlib.import_module(f"{PACKAGES[backend]}.{op}")


COMPOSED_OPS = ("compress_context", "block_layers", "draft_logits")
"""Ops that, without a kernel of their own, are other ops, each on its own backend; their kernels are for the few rows of a
step."""


class FloatBackends(NamedTuple):
    """The backend of each floating-point op of the drafter: its last bits are those of that backend."""

    linear: str = "xla"
    head_product: str = "xla"
    rms_norm: str = "xla"
    rope: str = "xla"
    swiglu: str = "xla"
    norm_rope: str = "xla"
    block_attention: str = "xla"
    block_layers: str = "xla"
    """All layers of the drafter: `pallas` does what the other ops do in them, but for the attention; else it is these ops."""
    compress_context: str = "xla"
    draft_logits: str = "xla"

    @classmethod
    def of(cls, backend: str) -> FloatBackends:
        """Each op on `backend` where it has a kernel for it, else on XLA; so are `COMPOSED_OPS`, whose shape is not known."""
        return cls(*(backend if op not in COMPOSED_OPS and has_kernel(op, backend) else "xla" for op in cls._fields))


ALL_XLA = FloatBackends()
