"""Generating text: a target, a drafter and the decode step, with requests that come and go."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import ops
from .config import DrafterConfig, Geometry, StepOptions
from .ops.checks import FLOATS, Layout, expect, expect_number
from .pages import PageAllocator
from .params import DrafterParams
from .prefill import store_prefill_context, token_bucket
from .requests import RequestId, RequestSlots
from .sampling import SamplingParams, row_sampling
from .state import init_state
from .step import StepInputs, StepOutputs, make_decode_step
from .target import Target

FinishReason = Literal["stop", "length", "cancelled"]


class RequestRefused(ValueError):
    """A request that this engine can never run: the message says which limit it exceeds."""


class Event(NamedTuple):
    """What one engine step did for one request."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """Its new tokens, at least one."""
    finish_reason: FinishReason | None
    """Set with the request's last tokens."""


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """A finished request."""

    request_id: RequestId
    prompt_length: int
    tokens: tuple[int, ...]
    """What was generated; the stop token, if that ended it, is the last."""
    finish_reason: FinishReason
    steps: int
    """Decode steps. The first token is not a step's: it comes from the prompt."""
    drafted_steps: int
    """Those that verified drafts: all but the first, and none without drafting."""
    accepted_drafts: tuple[int, ...]
    """`[K]`: in how many of them draft j was accepted, those past the request's end included."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step, 1 .. K+1; 0 for a request that ended before its first one."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """`[K]`: the share of drafted steps that accepted draft j."""
        return tuple(accepted / max(self.drafted_steps, 1) for accepted in self.accepted_drafts)


def pooled_acceptance(results: Sequence[RequestResult]) -> tuple[float, tuple[float, ...]]:
    """Of several requests: tokens per decode step and request, and the share of drafted steps that accepted draft j, `[K]`."""
    steps = sum(result.steps for result in results)
    drafted_steps = sum(result.drafted_steps for result in results)
    accepted = np.sum([result.accepted_drafts for result in results], axis=0)
    length = sum(len(result.tokens) - 1 for result in results) / max(steps, 1)
    return length, tuple(float(count / max(drafted_steps, 1)) for count in accepted)


@dataclasses.dataclass(eq=False)
class _Request:
    """A request that is waiting, prefilling or generating."""

    request_id: RequestId
    prompt: np.ndarray
    max_new_tokens: int
    stop_tokens: frozenset[int]
    sampling: SamplingParams
    accepted_drafts: np.ndarray
    next_tokens: np.ndarray
    """`[K+1]`: what the target verifies next, the last token and its drafts."""
    drawn: bool = False
    """Whether its drafts were drawn: the engine then keeps what from, at the request's slot."""
    prefilled: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    steps: int = 0
    drafted_steps: int = 0

    @property
    def cached(self) -> int:
        """Tokens in the target's cache while it generates: all but the last, which the next step verifies."""
        return len(self.prompt) + len(self.tokens) - 1

    def take(self, tokens: Iterable[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append tokens up to the request's end, and say which were taken and whether it ended."""
        first_new = len(self.tokens)
        reason: FinishReason | None = None
        for token in tokens:
            self.tokens.append(token)
            if token in self.stop_tokens:
                reason = "stop"
            elif len(self.tokens) == self.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        return tuple(self.tokens[first_new:]), reason

    def result(self, reason: FinishReason) -> RequestResult:
        return RequestResult(
            request_id=self.request_id,
            prompt_length=len(self.prompt),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            steps=self.steps,
            drafted_steps=self.drafted_steps,
            accepted_drafts=tuple(self.accepted_drafts.tolist()),
        )


def engine_geometry(
    config: DrafterConfig, *, max_batch: int, max_len: int, page_size: int, layout: Layout, num_drafts: int
) -> Geometry:
    """A geometry whose pool holds `max_batch` requests of `max_len` tokens each."""
    for name, value in (("max_batch", max_batch), ("max_len", max_len), ("page_size", page_size)):
        expect_number("Engine", name, value, 1)
    blocks = pages_needed(max_len, page_size, config.block_width(num_drafts))
    return Geometry(
        max_batch=max_batch,
        max_draft_len=num_drafts,
        page_size=page_size,
        num_pages=max_batch * blocks,
        max_blocks_per_seq=blocks,
        max_ctx=max_len,
        layout=layout,
    )


def pages_needed(num_tokens: int, page_size: int, block_size: int) -> int:
    """Pages for a request of `num_tokens`, with room behind them for the block that the last step drafts."""
    return -(-(num_tokens + block_size) // page_size)


@jax.jit
def _target_tokens(logits: jax.Array, sampling: ops.RowSampling | None) -> jax.Array:
    """The target's token after the first position of each row, `[B, ..., V]` -> `[B]`: no draft, None for greedy rows only."""
    first = logits.reshape(logits.shape[0], -1, logits.shape[-1])[:, 0]
    rows, vocab_size = first.shape
    no_drafts = jnp.zeros((rows, 0), jnp.int32)
    if sampling is None:
        tokens, _ = ops.accept_strict(first, no_drafts)
    else:
        tokens, _ = ops.accept_sampled(first, no_drafts, jnp.zeros((rows, 0, vocab_size)), sampling)
    return tokens[:, 0]


# by slot, so that what is compiled depends on one step's number of rows, not on two steps'
@functools.partial(jax.jit, donate_argnums=0)
def _keep_drawn(drawn_from: jax.Array, slots: jax.Array, probabilities: jax.Array) -> jax.Array:
    """`[slots, K, V]` with a step's `[B, K, V]` at the slots `[B]` of its rows."""
    return drawn_from.at[slots].set(probabilities)


@jax.jit
def _draft_probabilities(drawn_from: jax.Array, slots: jax.Array, drawn: jax.Array, draft_tokens: jax.Array) -> jax.Array:
    """`[B, K, V]`: what is kept at the rows' slots; where drafts were not drawn (`drawn`, `[B]`), one at each draft."""
    chosen = jax.nn.one_hot(draft_tokens, drawn_from.shape[-1], dtype=jnp.float32)
    return jnp.where(drawn[:, None, None], drawn_from[slots], chosen)


class Engine:
    """Continuous batching over `max_batch` slots: submit requests, then call `step` (or iterate `stream`) until idle.

    A step admits waiting requests in order while slots and pages last, prefills a chunk of each prompt that is not stored
    yet, and runs one decode step over everything that generates. All pages a request can need are handed out when it is
    admitted, so that one that runs never has to wait for another to end.

    With `drafting=False` the target verifies in the same shape, `[B, K+1]`, but one token per step is kept and no drafter
    runs: the baseline of a lossless comparison, because a GEMM of another shape has other bits. `num_drafts=0` is plain
    decoding, one token at a time.

    Not thread-safe. `submit`, `cancel` and `result` change nothing when they raise. An exception from the target or the
    device inside `step` ends the engine: what had been donated is gone.
    """

    def __init__(
        self,
        target: Target,
        config: DrafterConfig,
        params: DrafterParams,
        *,
        geometry: Geometry | None = None,
        max_batch: int = 8,
        max_len: int = 2048,
        page_size: int = 32,
        layout: Layout = "layer_major",
        num_drafts: int | None = None,
        drafting: bool = True,
        options: StepOptions | None = None,
        prefill_chunk: int = 256,
        prefill_budget: int = 1024,
    ):
        """
        Args:
            target: see `Target`.
            config, params: the drafter. Weights without `lm_head` get the target's.
            geometry: of the drafter's latent pool. Without one, `max_batch`, `max_len` (most tokens of a request, prompt
                included), `page_size`, `layout` and `num_drafts` make one, with pages for `max_batch` requests of `max_len`.
            num_drafts: K, drafts per step; the geometry's `max_draft_len` unless given, 7 (or what the drafter's
                `block_size` allows) without a geometry.
            options: of the decode step; its `sampling` is the engine's own affair: on while a request samples.
            prefill_chunk: most prompt tokens of one request and step.
            prefill_budget: prompt tokens of all requests and one step. Chunks are not cut: a step stops before the one that
                would exceed it, but the first always runs.

        Raises:
            ValueError, TypeError: sizes that do not fit together; names them.
        """
        if geometry is None:
            widest = 7 if config.block_size is None else min(7, config.block_size - config.first_draft_slot)
            drafts = widest if num_drafts is None else num_drafts
            expect_number("Engine", "num_drafts", drafts, 0)
            geometry = engine_geometry(
                config, max_batch=max_batch, max_len=max_len, page_size=page_size, layout=layout, num_drafts=max(drafts, 1)
            )
        else:
            drafts = geometry.max_draft_len if num_drafts is None else num_drafts
        expect_number("Engine", "num_drafts", drafts, 0, geometry.max_draft_len)
        expect_number("Engine", "prefill_chunk", prefill_chunk, 1)
        expect_number("Engine", "prefill_budget", prefill_budget, 1)
        geometry.check(config)
        if config.captured_size != target.captured_size:
            raise ValueError(
                f"Engine: the target captures {target.captured_size} numbers per token, but the drafter reads"
                f" {config.captured_size} (num_target_layers * target_hidden_size)"
            )
        self.target, self.config, self.geometry = target, config, geometry
        self.params = params if params.lm_head is not None else params.with_lm_head(target.lm_head)
        self.num_drafts = drafts
        self.drafting = drafting and drafts > 0
        self.decode_steps = 0
        """Decode steps run so far, whatever their batch."""
        self._prefill_chunk, self._prefill_budget = prefill_chunk, prefill_budget
        self._block_size = config.block_width(geometry.max_draft_len)
        if options is not None and options.force:
            raise ValueError(
                f"Engine: options.force is {options.force}: a forced acceptance emits text that is not the target's"
            )
        options = dataclasses.replace(StepOptions() if options is None else options, sampling=False)
        self._greedy_step = make_decode_step(config, geometry, options)
        self._sampling_step = make_decode_step(config, geometry, dataclasses.replace(options, sampling=True))
        self._drawn_from: jax.Array | None = None
        self._cache = target.init_cache(geometry.max_batch + 1, geometry.max_ctx + geometry.max_draft_len)
        self._state = init_state(config, geometry, dtype=params.kv_a_proj.dtype) if self.drafting else None
        self._slots = RequestSlots(geometry)
        self._pages = PageAllocator(geometry.num_pages)
        self._waiting: dict[RequestId, _Request] = {}
        self._prefilling: dict[RequestId, _Request] = {}
        self._generating: dict[RequestId, _Request] = {}
        self._results: dict[RequestId, RequestResult] = {}
        self._ids = itertools.count()

    # requests

    def submit(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        sampling: SamplingParams | None = None,
        request_id: RequestId = None,
    ) -> RequestId:
        """Queue a request and return its id, a new integer unless one is given.

        Raises:
            RequestRefused: it can never fit: too long for the context, the block table or the pool.
            ValueError, TypeError: an empty prompt, a token outside the vocabulary, an id in use. The engine is as before.
        """
        prompt = self._tokens("prompt_tokens", prompt_tokens)
        if not len(prompt):
            raise ValueError("Engine.submit: prompt_tokens is empty; a request needs at least one token to continue from")
        expect_number("Engine.submit", "max_new_tokens", max_new_tokens, 1)
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"Engine.submit: sampling is a {type(sampling).__name__}, expected SamplingParams (None is greedy)")
        stops = frozenset(self._tokens("stop_tokens", stop_tokens).tolist())
        total, geometry = len(prompt) + max_new_tokens, self.geometry
        wanted = f"Engine.submit: {len(prompt)} prompt tokens and max_new_tokens={max_new_tokens}"
        if total > geometry.max_ctx:
            raise RequestRefused(f"{wanted} make {total} tokens, the engine holds {geometry.max_ctx} per request (max_len)")
        pages = pages_needed(total, geometry.page_size, self._block_size)
        if pages > min(geometry.max_blocks_per_seq, geometry.num_pages):
            raise RequestRefused(
                f"{wanted} need {pages} pages of {geometry.page_size} tokens with the block's room of {self._block_size};"
                f" a request has {geometry.max_blocks_per_seq} (max_blocks_per_seq), the pool {geometry.num_pages} (num_pages)"
            )
        if request_id is None:
            request_id = next(number for number in self._ids if not self._known(number))
        elif self._known(request_id):
            raise ValueError(f"Engine.submit: request id {request_id!r} is in use; pop its result first, or name another")
        self._waiting[request_id] = _Request(
            request_id=request_id,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_tokens=stops,
            sampling=SamplingParams() if sampling is None else sampling,
            accepted_drafts=np.zeros(self.num_drafts, np.int64),
            next_tokens=np.zeros(self.num_drafts + 1, np.int32),
        )
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """End a request now; its result holds the tokens so far. One that has finished already stays as it is.

        Raises KeyError for an unknown id.
        """
        if request_id in self._results:
            return
        for requests in (self._waiting, self._prefilling, self._generating):
            if request_id in requests:
                self._finish(requests[request_id], "cancelled")
                return
        raise KeyError(f"Engine.cancel: no request {request_id!r}")

    def result(self, request_id: RequestId) -> RequestResult:
        """The result of a finished request, once: the engine forgets it. Raises KeyError if there is none (yet)."""
        if request_id not in self._results:
            state = "has not finished yet" if self._known(request_id) else "is unknown, or its result was taken already"
            raise KeyError(f"Engine.result: request {request_id!r} {state}")
        return self._results.pop(request_id)

    @property
    def idle(self) -> bool:
        """Whether every submitted request has finished."""
        return not (self._waiting or self._prefilling or self._generating)

    # running

    def step(self) -> list[Event]:
        """One round: admit, prefill, decode. Returns what each request got, oldest first token first."""
        self._admit()
        if self._state is not None:
            self._state = self._slots.clear(self._state)
        batch = list(self._generating.values())
        first_tokens = self._prefill()
        outputs = self._decode(batch) if batch else None
        # the only place where the host waits for the device
        first_tokens, outputs = jax.device_get((first_tokens, outputs))

        events = []
        if outputs is not None:
            self.decode_steps += 1
            for request, (tokens, drafts) in zip(batch, self._accepted(outputs, len(batch)), strict=True):
                request.steps += 1
                if self.drafting and request.steps > 1:
                    request.drafted_steps += 1
                    request.accepted_drafts[: len(tokens) - 1] += 1
                events.append(self._emit(request, tokens, drafts))
        for request_id, tokens in first_tokens.items():
            request = self._prefilling.pop(request_id)
            self._generating[request_id] = request
            # No drafts yet: the first step verifies zeros, in the one shape that is compiled anyway. One that happens to be
            # the target's token is as good as a draft.
            events.append(self._emit(request, tokens.tolist(), np.zeros(self.num_drafts, np.int32)))
        return events

    def stream(self) -> Iterator[tuple[RequestId, tuple[int, ...]]]:
        """Step until idle, yielding each request's new tokens as they come. Requests may be submitted in between."""
        while not self.idle:
            for event in self.step():
                yield event.request_id, event.tokens

    def run(self) -> dict[RequestId, RequestResult]:
        """Step until idle, and take the results of all finished requests."""
        while not self.idle:
            self.step()
        results, self._results = self._results, {}
        return results

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in order: a small one does not overtake a large one.

        All pages up to the request's last token at once: were they handed out as it grows, requests could stop one another
        half-way, each waiting for pages that the others hold.
        """
        while self._waiting and self._slots.free_slots:
            request = next(iter(self._waiting.values()))
            total = len(request.prompt) + request.max_new_tokens
            pages = pages_needed(total, self.geometry.page_size, self._block_size)
            if pages > self._pages.num_free:
                return
            self._pages.allocate(request.request_id, pages)
            self._slots.admit_generation(request.request_id)
            self._prefilling[request.request_id] = self._waiting.pop(request.request_id)

    def _prefill(self) -> dict[RequestId, jax.Array]:
        """Run a chunk of each prompt while the budget lasts; the first tokens, `[1]` each, of those that are complete.

        One request per call: a prompt's bits then depend on its own chunks, not on who came at the same time.
        """
        first_tokens: dict[RequestId, jax.Array] = {}
        spent = 0
        for request in self._prefilling.values():
            start = request.prefilled
            chunk = request.prompt[start : start + self._prefill_chunk]
            if spent and spent + len(chunk) > self._prefill_budget:
                break
            spent += len(chunk)
            width = token_bucket(len(chunk))
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(chunk)] = chunk
            slots = self._slots.slots([request.request_id])
            logits, captured, self._cache = self.target.prefill(
                self._cache, tokens, np.array([start], np.int32), np.array([len(chunk)], np.int32), slots
            )
            self._check_target("Target.prefill", logits, {"B": 1}, captured, {"B": 1, "T": width})
            if self._state is not None and self.params.fc is not None:
                index = np.arange(width, dtype=np.int32)
                self._state = store_prefill_context(
                    self.params,
                    self._state,
                    captured=captured.reshape(width, -1),
                    positions=start + index,
                    rows=np.where(index < len(chunk), np.int32(0), np.int32(-1)),
                    slots=slots,
                    encoded_offsets=self._encoded_offsets([request]),
                    backend=self._greedy_step.options.prefill_backend,
                    float_backend=self._greedy_step.options.float_backend,
                )
            request.prefilled += len(chunk)
            if request.prefilled == len(request.prompt):
                first_tokens[request.request_id] = _target_tokens(logits, self._row_sampling([request], 1))
        return first_tokens

    def _decode(self, batch: list[_Request]) -> StepOutputs | jax.Array:
        """Verify and draft for all requests that generate; without drafting the target's token of each row, `[B]`."""
        rows = self._bucket(len(batch))
        tokens = np.zeros((rows, self.num_drafts + 1), np.int32)
        start = np.zeros(rows, np.int32)
        slots = np.full(rows, self.geometry.dummy_slot, np.int32)
        slots[: len(batch)] = self._slots.slots([request.request_id for request in batch])
        for row, request in enumerate(batch):
            tokens[row], start[row] = request.next_tokens, request.cached
        sampling = self._row_sampling(batch, rows)
        logits, captured, self._cache = self.target.verify(self._cache, tokens, start, slots)
        of_rows: dict[str, int | None] = {"B": len(tokens), "K+1": tokens.shape[1]}
        self._check_target("Target.verify", logits, of_rows, captured, of_rows)
        if self._state is None:
            return _target_tokens(logits, sampling)
        inputs = StepInputs(
            logits=logits.reshape(-1, logits.shape[-1]),
            draft_tokens=tokens[:, 1:],
            captured=captured.reshape(-1, captured.shape[-1]),
            encoded_offsets=self._encoded_offsets(batch),
            slots=slots,
            sampling=sampling,
            draft_probabilities=None if sampling is None else self._probabilities_of(batch, slots, tokens[:, 1:]),
        )
        step = self._greedy_step if sampling is None else self._sampling_step
        outputs, self._state = step(self.params, self._state, inputs)
        if sampling is not None:
            self._drawn_from = _keep_drawn(self._drawn_from, slots, outputs.draft_probabilities)
        for request in batch:
            request.drawn = sampling is not None
        return dataclasses.replace(
            outputs, draft_probabilities=None, draft_logits=None, confidence=None, intermediates=None
        )  # what stays on the device

    def _probabilities_of(self, batch: list[_Request], slots: np.ndarray, draft_tokens: np.ndarray) -> jax.Array:
        """What a batch's drafts were drawn from; the first call makes room for every slot's."""
        assert self.params.lm_head is not None
        if self._drawn_from is None:
            shape = self.geometry.max_batch + 1, self.num_drafts, self.params.lm_head.shape[0]
            self._drawn_from = jnp.zeros(shape, jnp.float32)
        drawn = np.zeros(len(slots), bool)
        drawn[: len(batch)] = [request.drawn for request in batch]
        return _draft_probabilities(self._drawn_from, slots, drawn, draft_tokens)

    def _check_target(
        self, call: str, logits: Any, of_logits: dict[str, int | None], captured: Any, of_captured: dict[str, int | None]
    ) -> None:
        """Raise for results that are not what `Target` says: a later op would name an operand of its own."""
        expect(call, "logits", logits, of_logits | {"V": self.target.vocab_size}, FLOATS)
        if self._state is not None:
            expect(call, "captured", captured, of_captured | {"T*H_t": self.target.captured_size}, FLOATS)

    def _row_sampling(self, batch: list[_Request], rows: int) -> ops.RowSampling | None:
        """How a batch samples, padded with greedy rows; None if no request of it samples."""
        if all(request.sampling.greedy for request in batch):
            return None
        padding = rows - len(batch)
        positions = [request.cached + 1 for request in batch] + [0] * padding
        return row_sampling([request.sampling for request in batch] + [SamplingParams()] * padding, positions)

    def _accepted(self, outputs: Any, num_requests: int) -> Iterator[tuple[list[int], np.ndarray]]:
        """Each request's accepted tokens and its next drafts, from what the host read."""
        for row in range(num_requests):
            if isinstance(outputs, StepOutputs):
                yield outputs.accepted_tokens[row, : outputs.num_accepted[row]].tolist(), outputs.draft_tokens[row]
            else:
                yield [int(outputs[row])], np.zeros(self.num_drafts, np.int32)

    def _emit(self, request: _Request, tokens: list[int], drafts: np.ndarray) -> Event:
        """Hand a request its tokens, and end it or prepare what it verifies next."""
        taken, reason = request.take(tokens)
        if reason is None:
            request.next_tokens = np.concatenate([np.array(taken[-1:], np.int32), drafts])
        else:
            self._finish(request, reason)
        return Event(request.request_id, taken, reason)

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        request_id = request.request_id
        for requests in (self._waiting, self._prefilling, self._generating):
            requests.pop(request_id, None)
        if request_id in self._pages:
            self._pages.free(request_id)
            self._slots.finish([request_id])
        self._results[request_id] = request.result(reason)

    def _known(self, request_id: RequestId) -> bool:
        return any(request_id in held for held in (self._waiting, self._prefilling, self._generating, self._results))

    def _tokens(self, name: str, tokens: Any) -> np.ndarray:
        array = np.asarray(list(tokens) if isinstance(tokens, Iterable) and not hasattr(tokens, "dtype") else tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"Engine.submit: {name} is {array.dtype}{list(array.shape)}, expected a sequence of token ids")
        outside = array[(array < 0) | (array >= self.target.vocab_size)] if array.size else array
        if outside.size:
            raise ValueError(f"Engine.submit: {name} holds {outside[0]}, expected ids in [0, {self.target.vocab_size})")
        return array.astype(np.int32)

    def _bucket(self, num_requests: int) -> int:
        """Rows of the decode batch: the next power of two, at most max_batch."""
        return min(1 << (num_requests - 1).bit_length(), self.geometry.max_batch)

    def _encoded_offsets(self, batch: Sequence[_Request]) -> np.ndarray:
        """The page table of a batch, one shape whatever its size: `[pool_idx + 1, max_batch, 2, max_blocks_per_seq]`."""
        geometry = self.geometry
        offsets = np.full((geometry.pool_idx + 1, geometry.max_batch, 2, geometry.max_blocks_per_seq), -1, np.int32)
        for row, request in enumerate(batch):
            pages = self._pages.pages(request.request_id)
            offsets[geometry.pool_idx, row, 0, : len(pages)] = np.array(pages, np.int32) * geometry.offset_divisor
        return offsets
