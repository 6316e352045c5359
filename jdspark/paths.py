"""Which backend each op of a step runs on, and why: decided from what is static, before anything is traced."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp

from .config import StepOptions
from .ops.backends import COMPOSED_OPS, FloatBackends, has_kernel, why_unavailable, why_unsupported
from .params import DrafterParams

logger = logging.getLogger("jdspark")

FUSED_PROLOGUE_OPS = ("prepare_step", "store_prepared", "write_block_latents")
"""Ops that leave the plain path only with `StepOptions.fused_prologue`: the bookkeeping around the drafter."""

STEP_OPS = (
    "accept_strict", "prepare_step", "compress_context", "linear", "rms_norm", "norm_rope", "store_prepared", "head_product",
    "rope", "block_attention", "swiglu", "block_layers", "write_block_latents", "draft_logits", "markov_chain", "next_tokens",
)  # fmt: skip
"""The ops of a decode step, in the order of their first call. Where `norm_rope` and `store_prepared` have one backend the
context goes through `norm_rope_store`."""

SAMPLING_OPS = {"accept_strict": "accept_sampled", "markov_chain": "sampled_chain"}
"""What stands in their place with `StepOptions.sampling`."""

IN_LAYERS = ("linear", "rms_norm", "head_product", "rope", "swiglu")
"""What a kernel of `block_layers` does itself; outside of it these ops have their own paths."""

INEXACT_OPS = (*FloatBackends._fields, "markov_chain")
"""Ops whose kernels need not have XLA's bits: only an explicit backend picks them."""


@dataclasses.dataclass(frozen=True)
class Path:
    """The backend of one op, and why it is not another one."""

    backend: str
    why: str = ""
    """Empty if the op runs on what was asked for."""

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})" if self.why else self.backend


@functools.cache
def measured_times() -> dict[str, list[dict[str, Any]]]:
    """Device microseconds of each op by backend and batch size, as measured on an H200: the table that `auto` goes by."""
    return json.loads((files("jdspark") / "op_times.json").read_text(encoding="utf-8"))["ops"]


def fastest(op: str, B: int) -> Path:
    """The faster of plain XLA and Pallas for an op, from the measurements at the next larger batch size.

    Pallas only where it was faster at every context length measured there.
    """
    rows = measured_times().get(op, [])
    if not rows:
        return Path("xla", "no Pallas kernel was measured")
    sizes = sorted({row["B"] for row in rows})
    size = next((size for size in sizes if size >= B), sizes[-1])
    for row in rows:
        if row["B"] == size and row["pallas"] >= row["xla"]:
            return Path("xla", f"Pallas is not faster: {row['pallas']:.2f} us against {row['xla']:.2f} us at B={size}")
    return Path("pallas")


def choose_path(
    op: str,
    options: StepOptions,
    *,
    B: int,
    embedding_dtype: Any,
    mask_row_dtype: Any = None,
    shape: Any = None,
) -> Path:
    """The path of one op under these options.

    Args:
        shape: what the op's `unsupported` wants to know; None: a shape that its kernel takes, if it is not composed of ops.
    """
    if op in FUSED_PROLOGUE_OPS and not options.fused_prologue:
        return Path("xla", "fused_prologue is off")
    backend: str = options.backend
    if options.float_backend is not None and op in INEXACT_OPS:
        backend = options.float_backend
    elif backend == "auto":
        if not options.fused_prologue:
            return Path("xla", "fused_prologue is off")
        if op in INEXACT_OPS:
            return Path("xla", "its kernels may round differently, and a switch changes no bit")
        if jax.default_backend() != "gpu":
            return Path("xla", f"no GPU: JAX runs on {jax.default_backend()}")
        chosen = fastest(op, B)
        if chosen.backend == "xla":
            return chosen
        backend = chosen.backend
    if backend == "xla":
        return Path("xla")
    reason = why_unavailable(backend)
    if reason is None and not has_kernel(op, backend) and op not in COMPOSED_OPS:
        reason = f"it has no {backend} kernel"
    if reason is None and op == "prepare_step" and mask_row_dtype is not None and mask_row_dtype != embedding_dtype:
        reason = f"the trained mask row is {jnp.dtype(mask_row_dtype).name}, the embedding {jnp.dtype(embedding_dtype).name}"
    if reason is None and shape is None and op in COMPOSED_OPS and has_kernel(op, backend):
        reason = "the shapes of its weights are not known"
    if reason is None and shape is not None and has_kernel(op, backend):
        reason = why_unsupported(op, backend, shape)
    return Path(backend) if reason is None else Path("xla", f"not {backend}: {reason}")


def why_no_overlap(options: StepOptions, *, stores_context: bool = True, num_contexts: int = 0) -> str | None:
    """Why a step's context projection stays behind its acceptance, in JAX and in the twin; None if it runs beside it.

    Args:
        stores_context: whether there is one: the drafter has `fc` and the batch captured hidden states.
    """
    if not options.overlap_context_projection:
        return "overlap_context_projection is off"
    if not stores_context:
        return "there is no context projection"
    if not options.fused_prologue:
        return "fused_prologue is off, and a projection that no fused store takes is computed in its place"
    if num_contexts:
        return "the batch has context rows"
    return None


@dataclasses.dataclass(frozen=True)
class OverlapMechanism:
    """How a compiled step runs its context projection beside its acceptance on this machine."""

    name: str
    why: str
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What such a step is compiled with."""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def overlap_mechanism() -> OverlapMechanism:
    """The mechanism where JAX runs.

    Leaving the two parts unordered is not enough on a GPU: XLA runs a command buffer in the order of its schedule. Nor is a
    stream annotation, whose call that schedule starts behind the acceptance.
    """
    platform = jax.default_backend()
    if platform != "gpu":
        return OverlapMechanism("none", f"JAX runs on {platform}: the two parts are unordered, and XLA decides")
    return OverlapMechanism(
        "concurrent command buffers",
        "the step's CUDA graph has the edges of its data dependences only; what XLA launches outside of it, like every Triton"
        " kernel, overlaps nothing",
        {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
    )


def step_compiler_options(options: StepOptions, *, stores_context: bool = True, num_contexts: int = 0) -> dict[str, str] | None:
    """`compiler_options` of the `jax.jit` that a step runs in; None for XLA's defaults."""
    if why_no_overlap(options, stores_context=stores_context, num_contexts=num_contexts):
        return None
    return dict(overlap_mechanism().compiler_options) or None


def step_paths(params: DrafterParams, options: StepOptions, B: int, shapes: Mapping[str, Any] | None = None) -> dict[str, Path]:
    """The path of every op of a step with `B` gen rows; the log says once what does not run where it was asked to.

    Args:
        shapes: of the ops whose kernels do not take every shape.
    """
    mask_row = params.mask_token_embedding
    paths = {
        op: choose_path(
            op,
            options,
            B=B,
            embedding_dtype=params.embed_tokens.dtype,
            mask_row_dtype=None if mask_row is None else mask_row.dtype,
            shape=(shapes or {}).get(op),
        )
        for op in (SAMPLING_OPS.get(op, op) if options.sampling else op for op in STEP_OPS)
    }
    weights = {
        "compress_context": (params.fc, "the drafter has no fc"),
        "draft_logits": (params.lm_head, "there is no lm_head"),
    }
    paths |= {op: Path("xla", why) for op, (weight, why) in weights.items() if weight is None}
    if paths["block_layers"].backend == "pallas":  # else "it has no pallas kernel" would be said of what runs in one
        paths |= {op: Path("xla", "but in block_layers, which has its own") for op in IN_LAYERS if paths[op].backend == "xla"}
    why_not = why_no_overlap(options, stores_context=params.fc is not None)
    if options.overlap_context_projection and why_not:
        _log_once(f"overlap_context_projection is on, but not taken: {why_not}")
    plain: dict[str, list[str]] = {}
    for op, path in paths.items():
        if options.fused_prologue and op in FUSED_PROLOGUE_OPS and path.backend == "xla":
            _log_once(f"fused_prologue is on, but {op} runs on the plain path: {path.why or "backend is 'xla'"}")
        elif path.why.startswith("not "):
            plain.setdefault(path.why, []).append(op)
    for why, names in plain.items():
        _log_once(f"on XLA, {why}: {', '.join(names)}")
    return paths


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)
