"""The whole jitted decode step against its torch twin, step by step, with a scripted target.

`compare_steps` runs anywhere, two comparisons side by side:
- *exact*: a torch state that is carried through all steps gets JAX's floating-point results and does everything else
  itself. Every output, all bookkeeping and the whole pool must agree in every bit, however many steps lie behind.
- *bounded*: from a copy of JAX's state before the step, the twin computes everything itself. The floating-point results
  must lie within `WHOLE_STEP_BOUNDS`.

`compare_step_bits` needs a GPU: both sides launch every floating-point op from one Triton source, so nothing is given and
nothing is bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jdspark.config import DrafterConfig, Geometry, StepOptions
from jdspark.params import DrafterParams
from jdspark.prefill import store_prefill_context
from jdspark.state import DecodeState, init_state
from jdspark.step import DecodeStep, StepInputs, StepOutputs, make_decode_step

from . import twin
from .bridge import compare, largest_difference, to_numpy, to_torch
from .cases import normal
from .parity import Row, before_first_tie

WHOLE_STEP_BOUNDS = {"float32": 1e-5, "bfloat16": 2**-5}
"""Largest allowed `max|a - b| / max|b|` of a step's floating-point results, by the weights' dtype: some 40 GEMMs deep."""


@dataclasses.dataclass
class ScriptedTarget:
    """Stands in for a target model: random hidden states, and logits that accept a chosen prefix of each row's drafts.

    It also owns the pages: each slot's grow ahead of its context, drawn from a shuffled pool.
    """

    config: DrafterConfig
    geometry: Geometry
    rng: np.random.Generator
    vocab_size: int | None = None
    """Columns of its logits; None: the config's."""

    def __post_init__(self) -> None:
        self._free = [int(page) for page in self.rng.permutation(self.geometry.num_pages)]
        self._pages: dict[int, list[int]] = {}

    def grow(self, slot: int, num_tokens: int) -> None:
        """Make sure that the slot's pages hold `num_tokens`."""
        pages = self._pages.setdefault(slot, [])
        wanted = min(-(-num_tokens // self.geometry.page_size), self.geometry.max_blocks_per_seq)
        while len(pages) < wanted:
            if not self._free:
                raise RuntimeError(f"ScriptedTarget: the pool of {self.geometry.num_pages} pages is used up")
            pages.append(self._free.pop())

    def encoded_offsets(self, slots: Sequence[int]) -> np.ndarray:
        """The page manager's table for a batch of these slots; the dummy slot owns no page."""
        offsets = np.full((self.geometry.pool_idx + 1, len(slots), 2, self.geometry.max_blocks_per_seq), -1, np.int32)
        for row, slot in enumerate(slots):
            pages = self._pages.get(int(slot), [])
            offsets[self.geometry.pool_idx, row, 0, : len(pages)] = np.array(pages, np.int32) * self.geometry.offset_divisor
        return offsets

    def captured(self, num_tokens: int) -> np.ndarray:
        return normal(self.rng, num_tokens, self.config.captured_size)

    def step_inputs(self, draft_tokens: np.ndarray, slots: Sequence[int], context_slots: Sequence[int] = ()) -> StepInputs:
        """A verified batch: row b accepts a random prefix of its drafts, of any length from none to all."""
        B, K = draft_tokens.shape
        logits = self.rng.standard_normal(
            (len(context_slots) + B * (K + 1), self.vocab_size or self.config.vocab_size), np.float32
        )
        gen = logits[len(context_slots) :].reshape(B, K + 1, -1)
        for b, prefix in enumerate(self.rng.integers(0, K + 1, B)):
            gen[b, np.arange(prefix), draft_tokens[b, :prefix]] += 50
            if prefix < K:
                gen[b, prefix, draft_tokens[b, prefix]] -= 50
        return StepInputs(
            logits=logits,
            draft_tokens=draft_tokens.astype(np.int32),
            captured=self.captured(B * (K + 1)),
            encoded_offsets=self.encoded_offsets([*context_slots, *slots]),
            slots=np.array(slots, np.int32),
            num_contexts=len(context_slots),
        )

    def prompt(self, slot: int, first_position: int, num_tokens: int) -> dict[str, Any]:
        """Operands of `store_prefill_context` for one chunk of one request."""
        return {
            "captured": self.captured(num_tokens),
            "positions": np.arange(first_position, first_position + num_tokens, dtype=np.int32),
            "rows": np.zeros(num_tokens, np.int32),
            "slots": np.array([slot], np.int32),
            "encoded_offsets": self.encoded_offsets([slot]),
        }

    def chunks(self, slot: int, num_tokens: int) -> Iterator[dict[str, Any]]:
        """A new request's prompt in two chunks, with pages for it and its first step."""
        self.grow(slot, num_tokens + 2 * self.geometry.max_draft_len + 2)
        for first in (0, num_tokens // 2):
            yield self.prompt(slot, first, num_tokens // 2 if first == 0 else num_tokens - num_tokens // 2)

    def grow_ahead(self, num_slots: int, ctx_len: Any) -> None:
        """Pages for the next two steps of the first `num_slots` slots."""
        for slot in range(num_slots):
            self.grow(slot, int(to_numpy(ctx_len)[slot]) + 2 * (self.geometry.max_draft_len + 2))


@dataclasses.dataclass
class WholeStepReport:
    """What a run of compared steps showed."""

    exact_rows: list[Row]
    bounded_rows: list[Row]
    accepted: list[list[int]]
    """`num_accepted` of every step's gen rows."""
    step: DecodeStep
    state: DecodeState
    """JAX's state after the last step."""

    @property
    def agreed(self) -> bool:
        return all(row.passed == row.cases > 0 for row in [*self.exact_rows, *self.bounded_rows])


def stored_latents(state: DecodeState, encoded_offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`[N, L, D]` latents of row 0's tokens, read back from a JAX state's pool."""
    geometry = state.geometry
    table = encoded_offsets[geometry.pool_idx, 0, 0] // geometry.offset_divisor
    pages, offsets = table[positions // geometry.page_size], positions % geometry.page_size
    pool = to_numpy(state.pool)
    if geometry.layout == "layer_major":
        pool = pool.swapaxes(0, 1)
    return pool[pages, :, offsets]


@dataclasses.dataclass
class Schedule:
    """What every batch of a run holds."""

    target: ScriptedTarget
    prompt_lens: Sequence[int]
    """One gen request per prompt; each is prefilled in two chunks."""
    dummy_rows: int
    """Padding rows at the end of every batch, all in the dummy slot."""
    context_steps: Sequence[int]
    """Steps whose batch also holds a new request's prompt as a context row."""
    prefill: Callable[[int, int], None]
    """Stores a prompt of so many tokens in a slot, on all sides."""

    def __post_init__(self) -> None:
        geometry = self.target.geometry
        self._slots = [*range(len(self.prompt_lens)), *[geometry.dummy_slot] * self.dummy_rows]
        self._new_slot = len(self.prompt_lens)
        self.draft_tokens = np.zeros((len(self._slots), geometry.max_draft_len), np.int32)
        """Of the step that is next."""
        self.accepted: list[list[int]] = []
        """`num_accepted` of every step's gen rows."""
        for slot, length in enumerate(self.prompt_lens):
            self.prefill(slot, length)

    def inputs(self, number: int, ctx_len: Any) -> StepInputs:
        """Of step `number`; `ctx_len`: the slots' lengths ahead of it."""
        self.target.grow_ahead(len(self.prompt_lens), ctx_len)
        context_slots = []
        if number in self.context_steps:
            self.prefill(self._new_slot, 11)
            context_slots, self._new_slot = [self._new_slot], self._new_slot + 1
        return self.target.step_inputs(self.draft_tokens, self._slots, context_slots)

    def made(self, outputs: StepOutputs) -> None:
        """The step's outputs are there."""
        self.draft_tokens = to_numpy(outputs.draft_tokens)
        B = self.draft_tokens.shape[0]
        self.accepted.append([int(n) for n in to_numpy(outputs.num_accepted)[-B:]])


def compare_steps(
    config: DrafterConfig,
    params: DrafterParams,
    geometry: Geometry,
    *,
    num_steps: int = 20,
    prompt_lens: Sequence[int] = (37, 20),
    dummy_rows: int = 1,
    context_steps: Sequence[int] = (),
    options: StepOptions | None = None,
    seed: int = 0,
) -> WholeStepReport:
    """Prefill some prompts, then run `num_steps` decode steps on both sides and compare them after each.

    Args:
        prompt_lens, dummy_rows, context_steps: see `Schedule`.
    """
    rng = np.random.default_rng(seed)
    target = ScriptedTarget(config, geometry, rng)
    dtype = params.kv_a_proj.dtype
    state = init_state(config, geometry, dtype=dtype)
    start = normal(rng, *state.pool.shape, dtype=dtype)
    state = dataclasses.replace(state, pool=state.pool + start)
    torch_params = twin.as_torch(params)
    carried = twin.as_torch(state)
    options = dataclasses.replace(options or StepOptions(), return_intermediates=True)
    step = make_decode_step(config, geometry, options)
    bound = WHOLE_STEP_BOUNDS[np.dtype(dtype).name]
    rows: dict[tuple[str, bool], Row] = {}

    def enter(name: str, ours: Any, theirs: Any, bounded: bool = False) -> None:
        row = rows.setdefault((name, bounded), Row(name, ("jax", "torch"), bound=bound if bounded else None))
        row.cases += 1
        if bounded:
            difference = largest_difference(theirs, ours)
            row.worst, problem = max(row.worst, difference), "" if difference <= bound else f"off by {difference:.3g}"
        else:
            comparison = compare(theirs, ours)
            problem = "" if comparison else comparison.detail
        row.passed += not problem
        if problem:
            row.failures.append(problem)

    def prefill(slot: int, length: int) -> None:
        nonlocal state, carried
        for chunk in target.chunks(slot, length):
            alone = twin.as_torch(state)
            state = store_prefill_context(params, state, **chunk, backend=options.prefill_backend)
            twin.store_prefill_context(torch_params, alone, **twin.as_torch(chunk))
            enter("prefill: pool", state.pool, alone.pool, bounded=True)
            latents = stored_latents(state, chunk["encoded_offsets"], chunk["positions"])
            given = twin.as_torch({"given": latents, **chunk})
            twin.store_prefill_context(torch_params, carried, **given)
            enter("prefill: pool", state.pool, carried.pool)
            enter("prefill: ctx_len", state.ctx_len, carried.ctx_len)

    schedule = Schedule(target, prompt_lens, dummy_rows, context_steps, prefill)
    for number in range(num_steps):
        inputs = schedule.inputs(number, state.ctx_len)
        torch_inputs = twin.as_torch(inputs)
        alone = twin.as_torch(state)

        outputs, state = step(params, state, inputs)
        assert outputs.intermediates is not None

        given = twin.as_torch(outputs.intermediates)
        exact, carried = twin.decode_step(torch_params, carried, torch_inputs, options, given=given)
        for field in dataclasses.fields(outputs):
            ours, theirs = getattr(outputs, field.name), getattr(exact, field.name)
            if field.name != "intermediates" and ours is not None and theirs is not None:
                enter(field.name, ours, theirs)
        for name in ("pool", "ctx_len", "force_counter"):
            enter(f"state: {name}", getattr(state, name), getattr(carried, name))

        own, _ = twin.decode_step(torch_params, alone, torch_inputs, options)
        assert own.intermediates is not None
        for name in ("context_latents", "block_latents", "block_hidden", "base_logits"):
            enter(name, getattr(outputs.intermediates, name), getattr(own.intermediates, name), bounded=True)
        ours, theirs = before_first_tie(
            (outputs.intermediates.draft_logits, outputs.draft_tokens), (own.intermediates.draft_logits, own.draft_tokens)
        )
        enter("draft_logits", ours[0], theirs[0], bounded=True)
        for name in ("accepted_tokens", "num_accepted", "advertised"):
            enter(f"{name} (own floats)", getattr(outputs, name), getattr(own, name))
        schedule.made(outputs)
    return WholeStepReport(
        [row for (_, bounded), row in rows.items() if not bounded],
        [row for (_, bounded), row in rows.items() if bounded],
        schedule.accepted,
        step,
        state,
    )


class GraphTwin:
    """The twin's step as CUDA graphs on one state, one for each shape of batch, captured at its first use."""

    def __init__(self, params: DrafterParams, state: DecodeState, options: StepOptions):
        self.params, self.state, self.options = params, state, options
        self._captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, StepInputs, StepOutputs]] = {}

    def __call__(self, inputs: StepInputs) -> StepOutputs:
        """Replay the step on these inputs; the outputs are overwritten by the next call with their shapes."""
        shapes = tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(inputs))
        if shapes not in self._captured:
            self._captured[shapes] = self._capture(inputs)
        graph, static_inputs, outputs = self._captured[shapes]
        for static, leaf in zip(jax.tree.leaves(static_inputs), jax.tree.leaves(inputs), strict=True):
            static.copy_(leaf)
        graph.replay()
        return outputs

    def _capture(self, inputs: StepInputs) -> tuple[torch.cuda.CUDAGraph, StepInputs, StepOutputs]:
        static_inputs = jax.tree.map(torch.clone, inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, on a state of its own
            scratch = jax.tree.map(torch.clone, self.state)
            twin.decode_step(self.params, scratch, static_inputs, self.options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: JAX's own threads may allocate meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs, _ = twin.decode_step(self.params, self.state, static_inputs, self.options)
        return graph, static_inputs, outputs


@dataclasses.dataclass
class BitsReport:
    """What a run of `compare_step_bits` showed."""

    rows: list[Row]
    """Bitwise, one per output, part of the state and intermediate, for the eager twin and for its CUDA graph."""
    fast: dict[str, dict[str, tuple[int, int]]]
    """Values of each fast step that differ from the shared source's, and how many there are, by output; from equal inputs."""
    accepted: list[list[int]]
    """`num_accepted` of every step's gen rows."""
    step: DecodeStep
    state: DecodeState

    @property
    def agreed(self) -> bool:
        return all(row.passed == row.cases > 0 for row in self.rows)


def compare_step_bits(
    config: DrafterConfig,
    params: DrafterParams,
    geometry: Geometry,
    *,
    options: StepOptions,
    fast_options: Mapping[str, StepOptions] | None = None,
    graph: bool = True,
    num_steps: int = 100,
    prompt_lens: Sequence[int] = (37, 20),
    dummy_rows: int = 1,
    context_steps: Sequence[int] = (),
    seed: int = 0,
) -> BitsReport:
    """Prefill some prompts, then run `num_steps` decode steps in JAX, in the eager twin and in its CUDA graph.

    Three states are carried through, each by its own side. After each step every output, all floating-point results, the
    whole pool and all bookkeeping are compared in every bit; a context row's prompt is stored by all three as well.

    Args:
        options: of all sides; its floating-point ops must run on `triton`.
        fast_options: of further JAX steps, by name, each from a copy of the state before each step; their differences are
            counted.
        graph: compare a CUDA graph of the twin as well.
        prompt_lens, dummy_rows, context_steps: see `Schedule`.

    Raises:
        ValueError: the options' floating-point ops do not run on `triton`.
        BackendUnavailable: there is no GPU.
    """
    if (options.float_backend or options.backend) != "triton":
        raise ValueError("compare_step_bits: the floating-point ops must have one source: StepOptions(float_backend='triton')")
    options = dataclasses.replace(options, return_intermediates=True)
    step = make_decode_step(config, geometry, options)
    fast_steps = {
        name: make_decode_step(config, geometry, dataclasses.replace(of_fast, return_intermediates=True))
        for name, of_fast in (fast_options or {}).items()
    }
    assert params.lm_head is not None
    rng = np.random.default_rng(seed)
    target = ScriptedTarget(config, geometry, rng, params.lm_head.shape[0])
    state = init_state(config, geometry, dtype=params.kv_a_proj.dtype)
    state = dataclasses.replace(state, pool=jax.random.normal(jax.random.key(seed), state.pool.shape, state.pool.dtype))
    torch_params = jax.tree.map(to_torch, params)
    twins: dict[str, tuple[Callable[[StepInputs], StepOutputs], DecodeState]] = {}
    eager_state, graph_state = twin.as_torch(state), twin.as_torch(state)
    twins["torch"] = (lambda inputs: twin.decode_step(torch_params, eager_state, inputs, options)[0]), eager_state
    if graph:
        twins["torch graph"] = GraphTwin(torch_params, graph_state, options), graph_state
    rows: dict[str, Row] = {}
    fast: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in fast_steps}

    def enter(side: str, name: str, ours: Any, theirs: Any) -> None:
        row = rows.setdefault(f"{side} {name}", Row(name, ("jax", side)))
        comparison = compare(theirs, ours)
        row.cases += 1
        row.passed += comparison.equal
        if not comparison:
            row.failures.append(f"comparison {row.cases}: {comparison.mismatches} differ, {comparison.detail}")

    def enter_state(side: str, theirs: DecodeState) -> None:
        for name in ("pool", "ctx_len", "force_counter"):
            enter(side, f"state: {name}", getattr(state, name), getattr(theirs, name))

    def prefill(slot: int, length: int) -> None:
        nonlocal state
        for chunk in target.chunks(slot, length):
            state = store_prefill_context(
                params, state, **chunk, backend=options.prefill_backend, float_backend=options.float_backend
            )
            for side, (_, theirs) in twins.items():
                twin.store_prefill_context(torch_params, theirs, **twin.as_torch(chunk), ops=twin.float_ops(options))
                enter_state(f"{side}, prefill", theirs)

    schedule = Schedule(target, prompt_lens, dummy_rows, context_steps, prefill)
    for number in range(num_steps):
        inputs = jax.tree.map(jnp.asarray, schedule.inputs(number, state.ctx_len))
        torch_inputs = jax.tree.map(to_torch, inputs)
        fast_outputs = {
            name: fast_step(params, jax.tree.map(jnp.copy, state), inputs)[0] for name, fast_step in fast_steps.items()
        }

        outputs, state = step(params, state, inputs)
        ours = named_arrays(outputs)

        for side, (run_twin, their_state) in twins.items():
            theirs = named_arrays(run_twin(torch_inputs))
            for name, array in ours.items():
                enter(side, name, array, theirs[name])
            enter_state(side, their_state)
        for of_fast, counted in fast.items():
            for name, array in named_arrays(fast_outputs[of_fast]).items():
                differ, total = counted.get(name, (0, 0))
                counted[name] = (differ + max(compare(array, ours[name]).mismatches, 0), total + ours[name].size)
        schedule.made(outputs)
    return BitsReport(list(rows.values()), fast, schedule.accepted, step, state)


def named_arrays(outputs: StepOutputs) -> dict[str, Any]:
    """Every array of a step's outputs that is there, intermediates included."""
    parts = {**vars(outputs), **(vars(outputs.intermediates) if outputs.intermediates else {})}
    return {name: part for name, part in parts.items() if part is not None and name != "intermediates"}
