"""Finding the kernel of an op for a backend other than plain XLA, and saying why there is none."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Backend = Literal["xla", "pallas", "triton"]


class BackendUnavailable(RuntimeError):
    """The requested backend cannot run this op on this machine; the message says why and what to do."""


def why_unavailable(backend: str) -> str | None:
    """None if `backend` can run on this machine, else the reason. Raises ValueError for an unknown name."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(get_args(Backend))}")
    if backend == "xla":
        return None
    if backend == "triton":
        if jax.default_backend() != "gpu":
            return f"Triton kernels inside JAX need an NVIDIA GPU, and JAX runs on {jax.default_backend()} here"
        if importlib.util.find_spec("jax_triton") is None:
            return "jax-triton is not installed (pip install 'jdspark[gpu]')"
        return "no op has a Triton kernel yet"
    return "no op has a Pallas kernel yet"


def kernel(op: str, backend: str) -> Callable[..., Any]:
    """The implementation of `op` on `backend`, imported on first use; raises BackendUnavailable with the reason."""
    reason = why_unavailable(backend)
    if reason is not None:
        raise BackendUnavailable(f"{op}: backend={backend!r} is not available: {reason}; backend='xla' runs everywhere")
    module = importlib.import_module(f"pallas_kernels.{op}")
    return getattr(module, op)
