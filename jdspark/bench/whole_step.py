"""Part (b): the whole decode step, in JAX under every combination of switches and backends."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..config import Geometry, StepOptions
from ..params import DrafterParams
from ..paths import step_compiler_options
from ..state import Changing, DecodeState, joined, split
from ..step import DecodeStep, StepInputs, decode_step, make_decode_step
from .bookkeeping import Carried, copies_pool
from .clock import Variant, describe, or_raise, seconds_of, seconds_per_call
from .scale import Scale

MAIN: dict[str, StepOptions] = {
    "jax plain": StepOptions(),
    "jax fused": StepOptions(fused_prologue=True),
    "jax fused, pallas": StepOptions(fused_prologue=True, backend="pallas"),
    "jax fused, overlap, pallas": StepOptions(fused_prologue=True, overlap_context_projection=True, backend="pallas"),
}
"""Variants of every cell, by `StepOptions`; `backend="auto"` where none is named."""

OTHERS: dict[str, StepOptions] = {
    "jax overlap": StepOptions(overlap_context_projection=True),
    "jax fused, overlap": StepOptions(fused_prologue=True, overlap_context_projection=True),
    "jax pallas": StepOptions(backend="pallas"),
    "jax fused, triton": StepOptions(fused_prologue=True, backend="triton"),
    "jax fused, pallas, triton floats": StepOptions(fused_prologue=True, backend="pallas", float_backend="triton"),
}
"""The other combinations."""


def backends_of(options: StepOptions) -> list[str]:
    """The backends that these options name."""
    return [str(backend) for backend in (options.backend, options.float_backend) if backend not in ("auto", None)]


def make_step(scale: Scale, geometry: Geometry, options: StepOptions) -> DecodeStep:
    return make_decode_step(scale.config, geometry, options)


def loop_steps(scale: Scale, options: StepOptions, geometry: Geometry) -> int:
    """Steps in one dispatch of this step's loop: so many that what each dispatch has besides is little, in its share of a step.

    Where XLA gathers the contexts a step takes milliseconds, and fewer do.
    """
    tokens = geometry.max_batch * geometry.max_ctx
    if tokens <= 8192 or "pallas" in backends_of(options):
        return scale.step_loop
    return max(1, scale.step_loop // (4 if tokens < 131072 else 8))


def lowered_loop(steps: int, options: StepOptions, params: DrafterParams, state: DecodeState, inputs: StepInputs) -> Any:
    """So many steps on the same inputs in one jitted loop, the state donated: `jax.stages.Lowered`.

    A step streams its weights through the cache, which is empty of everything else when the next one begins. The barrier keeps
    what depends on weights and inputs alone inside the loop.
    """
    changing, constant = split(state)

    def one_step(
        _: Any, carried: tuple[Changing, Any], params: DrafterParams, inputs: StepInputs, constant: DecodeState
    ) -> Any:
        changing, _ = carried
        params, inputs, ctx_len = jax.lax.optimization_barrier((params, inputs, changing.ctx_len))
        outputs, state = decode_step(params, joined(changing._replace(ctx_len=ctx_len), constant), inputs, options)
        return split(state)[0], outputs

    def loop(params: DrafterParams, changing: Changing, constant: DecodeState, inputs: StepInputs) -> Any:
        body = functools.partial(one_step, params=params, inputs=inputs, constant=constant)
        shapes = jax.eval_shape(lambda: body(0, (changing, None)))[1]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, steps, body, (changing, empty))

    return jax.jit(loop, donate_argnums=1, compiler_options=step_compiler_options(options)).lower(
        params, changing, constant, inputs
    )


def run_loop(loop: Any, params: DrafterParams, carried: Carried, sets: Sequence[StepInputs]) -> None:
    """The compiled `lowered_loop` once on each set of inputs, back to back, waited for."""
    for inputs in sets:
        changing, _ = loop(params, *split(carried.state), inputs)
        carried.state = dataclasses.replace(carried.state, **changing._asdict())
    carried.state.ctx_len.block_until_ready()


def loop_seconds(run: Callable[[int], None]) -> float:
    """Device seconds of one run of a loop: two less one, so that the host's part of a call is not in it."""
    run(1)  # the calls before may have been other executables'; their command buffers are not this one's
    once, twice = (seconds_of(functools.partial(run, times)) for times in (1, 2))
    return seconds_per_call(1, once, 2, twice)


def variant(
    warm: Any, loop: Any, steps: int, step: DecodeStep, params: DrafterParams, carried: Carried, sets: Sequence[StepInputs]
) -> Variant:
    """A call is one step through the public interface, checks and dispatch included, on the carried state.

    Args:
        warm: the compiled step or why there is none, as `compile_all` has it; calls find it in the step's own cache.
        loop: `lowered_loop` of so many `steps` compiled, or why there is none; device time is what a step of it takes.
    """
    or_raise(warm)
    in_turn = itertools.cycle(sets)

    def run() -> Any:
        outputs, carried.state = step(params, carried.state, next(in_turn))
        return outputs, carried.state.ctx_len

    if loop is None:
        return Variant(run)
    if isinstance(loop, Exception):
        return Variant(run, note=f"no loop: {describe(loop)}")

    def looped(times: int) -> None:
        run_loop(loop, params, carried, [next(in_turn) for _ in range(times)])

    looped(1)
    return Variant(
        run, device_seconds=lambda calls: loop_seconds(looped) / steps * calls, device_clock="loop",
        note=copies_pool(loop, carried.state.pool),
    )  # fmt: skip
