"""Part (b): the whole decode step, in JAX under every combination of switches and backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import Geometry, StepOptions
from ..params import DrafterParams
from ..step import DecodeStep, StepInputs, make_decode_step
from .bookkeeping import Carried
from .clock import Variant, or_raise
from .scale import Scale

MAIN: dict[str, StepOptions] = {
    "jax plain": StepOptions(),
    "jax fused": StepOptions(fused_prologue=True),
    "jax fused, pallas": StepOptions(fused_prologue=True, backend="pallas"),
}
"""Variants of every cell, by `StepOptions`; `backend="auto"` where none is named."""

OTHERS: dict[str, StepOptions] = {
    "jax overlap": StepOptions(overlap_context_projection=True),
    "jax fused, overlap": StepOptions(fused_prologue=True, overlap_context_projection=True),
    "jax pallas": StepOptions(backend="pallas"),
    "jax fused, overlap, pallas": StepOptions(fused_prologue=True, overlap_context_projection=True, backend="pallas"),
    "jax fused, triton": StepOptions(fused_prologue=True, backend="triton"),
    "jax fused, pallas, triton floats": StepOptions(fused_prologue=True, backend="pallas", float_backend="triton"),
}
"""The other combinations."""


def step_options(every: bool) -> dict[str, StepOptions]:
    """The options to measure, by name."""
    return MAIN | OTHERS if every else MAIN


def backends_of(options: StepOptions) -> list[str]:
    """The backends that these options name."""
    return [str(backend) for backend in (options.backend, options.float_backend) if backend not in ("auto", None)]


def make_step(scale: Scale, geometry: Geometry, options: StepOptions) -> DecodeStep:
    return make_decode_step(scale.config, geometry, options)


def variant(warm: Any, step: DecodeStep, params: DrafterParams, carried: Carried, sets: Sequence[StepInputs]) -> Variant:
    """A call is one step through the public interface, checks and dispatch included, on the carried state.

    Args:
        warm: the compiled step or why there is none, as `compile_all` has it; calls find it in the step's own cache.
    """
    or_raise(warm)
    number = 0

    def run() -> Any:
        nonlocal number
        outputs, carried.state = step(params, carried.state, sets[number % len(sets)])
        number += 1
        return outputs, carried.state.ctx_len

    return Variant(run)
