"""The torch side of `python -m jdspark bench`: the eager chain and the fused kernels, as CUDA graphs on a GPU.

`jdspark.bench` looks this module up by name where torch is installed and asks it for variants; operands come from there, as JAX
arrays, so that both frameworks run on the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from jdspark.bench.bookkeeping import Ready
from jdspark.bench.clock import Variant
from jdspark.bench.scale import Scale
from jdspark.config import StepOptions
from jdspark.params import DrafterParams
from jdspark.state import DecodeState
from jdspark.step import StepInputs

from . import eager, twin
from .bridge import to_torch

BOOKKEEPING = ("torch eager", "torch fused")
"""Variants of the bookkeeping: the unfused chain, the Triton kernels."""

COMPILED = "torch compile"
"""The unfused chain under `torch.compile`."""

STEPS: dict[str, StepOptions] = {
    "torch eager": StepOptions(),
    "torch fused": StepOptions(fused_prologue=True),
    "torch fused, overlap": StepOptions(fused_prologue=True, overlap_context_projection=True),
    "torch fused, triton floats": StepOptions(fused_prologue=True, float_backend="triton"),
}
"""Variants of the whole step: the eager twin, with fused bookkeeping, and with Triton's products and attention as well."""

MAIN_STEPS = ("torch eager", "torch fused")
"""Those of every cell."""

NEEDS_GPU = "without a GPU this would time an interpreter"


def on_gpu() -> bool:
    """Whether JAX runs on a GPU: torch runs where the operands are."""
    return jax.default_backend() == "gpu"


def sees_device() -> bool:
    """Whether torch can run where JAX does."""
    return torch.cuda.is_available() or not on_gpu()


def unavailable(name: str) -> str:
    """Why a variant is not measured on this machine; empty if it is."""
    if name == COMPILED and not on_gpu():
        return "a CUDA graph of the compiled chain needs a GPU"
    return NEEDS_GPU if "fused" in name and not on_gpu() else ""


def as_shared(tree: Any) -> Any:
    """Params or operands as torch tensors that share JAX's memory: nothing here writes into them."""
    return jax.tree.map(to_torch, tree)


def bookkeeping_step(
    params: DrafterParams, state: DecodeState, ready: Ready, *, fused: bool, acceptance: bool, K: int
) -> tuple[torch.Tensor, ...]:
    """One step's bookkeeping on torch tensors, `state` updated in place; see `jdspark.bench.bookkeeping.bookkeeping`."""
    config, geometry = state.config, state.geometry
    kernels: Any = eager
    if fused:
        from . import triton_kernels as kernels
    accepted_tokens, num_accepted = ready.accepted_tokens, ready.num_accepted
    if acceptance:
        accepted_tokens, num_accepted = kernels.accept_strict(ready.inputs.logits, ready.inputs.draft_tokens)

    def latents_at(positions: torch.Tensor) -> torch.Tensor:
        return kernels.norm_rope(
            ready.compressed, positions, params.kv_a_layernorm, state.rope_cos, state.rope_sin, eps=config.rms_norm_eps
        )

    prepare = twin.prepare_with_triton if fused else twin.prepare_with_eager_chain
    prologue, advertised, placement = prepare(state, ready.inputs, accepted_tokens, num_accepted, latents_at)
    noise = kernels.noise_block(
        params.embed_tokens, prologue.bonus, block_size=config.block_width(K), mask_token_id=config.mask_token_id
    )
    kernels.write_block_latents(state.pool, ready.block_latents, placement, layout=geometry.layout)
    read: tuple[torch.Tensor, ...] = (noise, prologue.bonus, prologue.query_positions, placement.page_tables, advertised)
    if acceptance:
        read += (kernels.next_tokens(accepted_tokens, num_accepted, ready.inputs.draft_tokens),)
    return read


def bookkeeping_variant(
    name: str, scale: Scale, params: DrafterParams, state: DecodeState, sets: Sequence[Ready], *, acceptance: bool
) -> Variant:
    """The bookkeeping of several steps, on every set of operands in turn: on a GPU one CUDA graph, else the calls themselves.

    Args:
        name: of `BOOKKEEPING`, or `COMPILED`.
        params, state, sets: of torch tensors; `state` is written.
    """

    def step(ready: Ready) -> Any:
        return bookkeeping_step(params, state, ready, fused=name == "torch fused", acceptance=acceptance, K=scale.K)

    call: Callable[[Ready], Any] = step
    if name == COMPILED:
        torch.compiler.reset()  # what was compiled for the last shapes counts towards a limit
        call = torch.compile(step, dynamic=False)
    if not on_gpu():
        return Variant(lambda: [call(ready) for ready in sets], lambda _: None, steps=len(sets))
    # a replay costs the host some 10 us: one graph of enough steps that the device is what takes the time
    graph, kept = capture([lambda ready=ready: call(ready) for ready in [*sets] * 8])  # type: ignore[misc]
    return graph_variant([graph], kept, steps=8 * len(sets))


def step_variant(name: str, params: DrafterParams, state: DecodeState, sets: Sequence[StepInputs]) -> Variant:
    """The whole step: on a GPU one CUDA graph for each set of inputs, replayed in turn, else the calls themselves."""

    def step(inputs: StepInputs) -> Any:
        return twin.decode_step(params, state, inputs, STEPS[name])[0]

    if not on_gpu():
        number = iter(range(1 << 62))
        return Variant(lambda: step(sets[next(number) % len(sets)]), lambda _: None)
    captured = [capture([lambda inputs=inputs: step(inputs)]) for inputs in sets]  # type: ignore[misc]
    return graph_variant([graph for graph, _ in captured], [kept for _, kept in captured], steps=1)


def accept_variant(inputs: StepInputs) -> Variant:
    """The acceptance by itself, on the fused kernels."""
    from . import triton_kernels

    return Variant(lambda: triton_kernels.accept_strict(inputs.logits, inputs.draft_tokens), lambda _: torch.cuda.synchronize())


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A CUDA graph of these calls, one after the other, and their results, whose memory belongs to the graph.

    Each call runs once before: it compiles and allocates then. Calls that update a state in place have done it once more.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: JAX's own threads may allocate meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [call() for call in calls]
    return graph, results


def graph_variant(graphs: Sequence[torch.cuda.CUDAGraph], kept: Any, *, steps: int) -> Variant:
    """Replays the graphs in turn. `kept` is what they read and write, kept alive with them."""
    number = 0

    def run() -> Any:
        nonlocal number
        graphs[number % len(graphs)].replay()
        number += 1
        return kept

    def device_seconds(calls: int) -> float:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        for _ in range(calls):
            run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    return Variant(run, lambda _: torch.cuda.synchronize(), steps=steps, device_seconds=device_seconds, device_clock="events")


def torch_state(state: DecodeState) -> DecodeState:
    """A copy of a JAX state as torch tensors, its rope tables shared."""
    copied: dict[str, Any] = {name: to_torch(getattr(state, name), copy=True) for name in ("pool", "ctx_len", "force_counter")}
    shared: dict[str, Any] = {name: to_torch(getattr(state, name)) for name in ("rope_cos", "rope_sin")}
    return dataclasses.replace(state, **copied, **shared)


def of_cell(state: DecodeState, jax_state: DecodeState) -> DecodeState:
    """A torch state's pool with the lengths and sizes of a JAX state."""
    return dataclasses.replace(state, ctx_len=to_torch(jax_state.ctx_len, copy=True), geometry=jax_state.geometry)


def release() -> None:
    """Give torch's unused memory back to the device, for JAX."""
    if on_gpu():
        torch.cuda.empty_cache()
