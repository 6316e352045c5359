"""The whole decode step as one jitted function."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from . import ops
from .config import DrafterConfig, Geometry, StepOptions
from .drafter import (
    LayersShape,
    ProductShape,
    compress_context,
    confidence_logits,
    draft_block,
    draft_logits,
    draft_slots,
)
from .ops import contracts
from .ops.accept_strict import advances_force_counter
from .ops.backends import BackendUnavailable, FloatBackends, why_unavailable
from .ops.block_attention import AttentionShape
from .ops.checks import FLOATS, INTEGERS, expect
from .ops.row_argmax import row_argmax
from .params import Array, DrafterParams
from .paths import overlap_mechanism, step_compiler_options, step_paths, why_no_overlap
from .state import (
    Changing,
    DecodeState,
    check_alive,
    check_offsets,
    check_state,
    device_of,
    joined,
    name_divided,
    pinned_jit,
    split,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """One step's batch: `num_contexts` context (prefill) rows first, then `B` gen rows."""

    logits: Array
    """`[num_contexts + B*(K+1), V]` float32: the target's, one row per context row, K+1 per gen row."""
    draft_tokens: Array
    """`[B, K]` int32: the drafts the target just verified."""
    captured: Array
    """`[B*(K+1), T*H_t]`: the gen rows' hidden states of the captured target layers; None: nothing is stored."""
    encoded_offsets: Array
    """`[pools, seqs, 2, max_blocks]` int32: the page manager's table, see `refresh_block_tables`."""
    slots: Array
    """`[B]` int32: each gen request's slot; padding rows use the dummy slot `max_batch`. Or one per row, `[num_contexts + B]`:
    those of the context rows are not read, `store_prefill_context` has them."""
    num_contexts: int = dataclasses.field(default=0, metadata={"static": True})
    sampling: ops.RowSampling | None = None
    """`[num_contexts + B]` each, with `StepOptions.sampling`: `positions` is that of the token behind the last known one."""
    draft_probabilities: Array = None
    """`[B, K, V']` float32, with `StepOptions.sampling`: what `draft_tokens` were drawn from."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intermediates:
    """The floating-point results of a step; None for a part that did not run."""

    context_latents: Array | None = None
    """`[B*(K+1), L, D]`: what the store was given."""
    block_latents: Array | None = None
    """`[L, B, block_size, D]`"""
    block_hidden: Array | None = None
    """`[B, block_size, H]`, after the final norm."""
    base_logits: Array | None = None
    """`[B, K, V]` fp32, before the Markov head."""
    draft_logits: Array | None = None
    """`[B, K, V]` fp32, after it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a step decided; `rows = num_contexts + B`."""

    accepted_tokens: Array
    """`[rows, K+1]` int32: the target's token at every position; the first `num_accepted` of a row are accepted."""
    num_accepted: Array
    """`[rows]` int32, 1..K+1."""
    draft_tokens: Array
    """`[B, K]` int32: the next drafts."""
    next_tokens: Array
    """`[rows, K+1]` int32: what the target verifies next."""
    kv_rewind: Array
    """`[B]` int32, `1 - num_accepted`: what the target engine subtracts from its KV lengths after having added 1."""
    target_seq_lens: Array
    """`[B]` int32: tokens the target processes per gen row, K+1."""
    advertised: Array
    """`[B]` int32: context tokens the drafter attended to."""
    draft_probabilities: Array | None = None
    """`[B, K, V]` fp32, with `sampling`: what the next drafts were drawn from."""
    draft_logits: Array | None = None
    """`[B, K, V]` fp32, with `return_draft_logits`: after the Markov head."""
    confidence: Array | None = None
    """`[B, K]` fp32 logits, with `return_confidence`."""
    intermediates: Intermediates | None = None
    """With `return_intermediates`."""


def decode_step(
    params: DrafterParams, state: DecodeState, inputs: StepInputs, options: StepOptions
) -> tuple[StepOutputs, DecodeState]:
    """One decode step, pure and unchecked: what `make_decode_step` jits. Read it top to bottom."""
    config, geometry = state.config, state.geometry
    B, K = inputs.draft_tokens.shape
    num_contexts = inputs.num_contexts
    block_size = config.block_width(geometry.max_draft_len)
    pool, ctx_len, force_counter = state.pool, state.ctx_len, state.force_counter
    paths = step_paths(params, options, B, kernel_shapes(params, config, geometry, B))
    backends = FloatBackends(**{op: paths[op].backend for op in FloatBackends._fields})

    if options.sampling:
        assert inputs.sampling is not None  # checked before dispatch
        accepted_tokens, num_accepted = ops.accept_sampled(
            inputs.logits, inputs.draft_tokens, inputs.draft_probabilities, inputs.sampling, num_contexts=num_contexts
        )
    else:
        accepted_tokens, num_accepted = ops.accept_strict(
            inputs.logits,
            inputs.draft_tokens,
            num_contexts=num_contexts,
            force=options.force,
            force_counter=force_counter,
            backend=paths["accept_strict"].backend,
        )
    if advances_force_counter(options.force, K):
        force_counter = force_counter + 1
    stores_context = inputs.captured is not None and params.fc is not None and B > 0
    captured = inputs.captured
    if stores_context and why_no_overlap(options, num_contexts=num_contexts):
        # the projection has no other dependence on the acceptance: this is what orders it behind it
        accepted_tokens, num_accepted, captured = jax.lax.optimization_barrier((accepted_tokens, num_accepted, captured))
    gen_num_accepted = num_accepted[num_contexts:]

    drafts = K > 0 and B > 0
    prepared = ops.prepare_step(
        inputs.encoded_offsets,
        accepted_tokens[num_contexts:],
        gen_num_accepted,
        ctx_len,
        inputs.slots[inputs.slots.shape[0] - B :],
        pool_idx=geometry.pool_idx,
        divisor=geometry.offset_divisor,
        page_size=geometry.page_size,
        block_size=block_size,
        max_ctx=geometry.max_ctx,
        mask_token_id=config.mask_token_id,
        num_contexts=num_contexts,
        advance=stores_context,
        embedding=params.embed_tokens if drafts else None,
        mask_row=params.mask_token_embedding if drafts else None,
        backend=paths["prepare_step"].backend,
    )
    context_latents = None
    if stores_context:
        compressed = compress_context(params, config, captured, backends=backends)
        normed = (prepared.prologue.context_positions.reshape(-1), params.kv_a_layernorm, state.rope_cos, state.rope_sin)
        stored = (gen_num_accepted, prepared.store_pages, prepared.store_offsets)
        eps, store_backend = config.rms_norm_eps, paths["store_prepared"].backend
        if backends.norm_rope == store_backend:
            pool, context_latents = ops.norm_rope_store(
                pool, compressed, *normed, *stored,
                eps=eps, layout=geometry.layout, return_latents=options.return_intermediates, backend=store_backend,
            )  # fmt: skip
        else:
            context_latents = ops.norm_rope(compressed, *normed, eps=eps, backend=backends.norm_rope)
            pool = ops.store_prepared(pool, context_latents, *stored, layout=geometry.layout, backend=store_backend)

    draft_tokens = jnp.zeros((B, K), jnp.int32)
    floats: dict[str, jax.Array | None] = {"context_latents": context_latents}
    draft_probabilities = confidence = None
    if drafts:
        block_hidden, block_latents = draft_block(
            params, config, geometry, prepared.noise, prepared.prologue.query_positions, pool, prepared.placement,
            prepared.advertised, state.rope_cos, state.rope_sin, backends=backends,
        )  # fmt: skip
        # The last layer's attention does not feed the latents; without this it could read after the write, and XLA would
        # copy the whole pool to allow it.
        block_hidden, block_latents = jax.lax.optimization_barrier((block_hidden, block_latents))
        pool = ops.write_block_latents(
            pool, block_latents, prepared.placement, layout=geometry.layout, backend=paths["write_block_latents"].backend
        )
        slot_hidden = draft_slots(config, block_hidden, K)
        base_logits = draft_logits(params, slot_hidden, backends=backends)
        if options.sampling:
            assert inputs.sampling is not None
            gen_sampling = inputs.sampling.gen_rows(num_contexts)
            gen_sampling = gen_sampling._replace(positions=gen_sampling.positions + gen_num_accepted)
            logits, draft_probabilities, draft_tokens = ops.sampled_chain(
                base_logits, prepared.prologue.bonus, params.markov_w1, params.markov_w2, gen_sampling
            )
        elif params.markov_w1 is not None and params.markov_w2 is not None:
            logits, draft_tokens = ops.markov_chain(
                base_logits, prepared.prologue.bonus, params.markov_w1, params.markov_w2, backend=paths["markov_chain"].backend
            )
        else:
            logits, draft_tokens = base_logits, row_argmax(base_logits)
        if options.return_confidence:
            previous = jnp.concatenate([prepared.prologue.bonus[:, None], draft_tokens[:, :-1]], axis=1)
            confidence = confidence_logits(params, config, slot_hidden, previous, backends=backends)
        floats |= {
            "block_latents": block_latents, "block_hidden": block_hidden, "base_logits": base_logits, "draft_logits": logits
        }  # fmt: skip

    outputs = StepOutputs(
        accepted_tokens=accepted_tokens,
        num_accepted=num_accepted,
        draft_tokens=draft_tokens,
        next_tokens=ops.next_tokens(accepted_tokens, num_accepted, draft_tokens, backend=paths["next_tokens"].backend),
        kv_rewind=1 - gen_num_accepted,
        target_seq_lens=jnp.full(B, K + 1, jnp.int32),
        advertised=prepared.advertised,
        draft_probabilities=draft_probabilities,
        draft_logits=floats.get("draft_logits") if options.return_draft_logits else None,
        confidence=confidence,
        intermediates=Intermediates(**floats) if options.return_intermediates else None,
    )
    return outputs, dataclasses.replace(state, pool=pool, ctx_len=prepared.ctx_len, force_counter=force_counter)


def kernel_shapes(params: DrafterParams, config: DrafterConfig, geometry: Geometry, B: int) -> dict[str, Any]:
    """The shapes of the ops whose kernels do not take every one: queries, latents and pool have `kv_a_proj`'s dtype."""
    block_size, dtypes = config.block_width(geometry.max_draft_len), (jnp.dtype(params.kv_a_proj.dtype).name,)
    matrices = [x for x in jax.tree.leaves((params.embed_tokens, params.kv_a_proj, params.layers)) if len(x.shape) > 1]
    of_layers = tuple(sorted({jnp.dtype(x.dtype).name for x in matrices}))
    attention = AttentionShape(
        B=B, block_size=block_size, width=config.latent_dim, kv_lora_rank=config.kv_lora_rank,
        page_size=geometry.page_size, dtypes=dtypes,
    )  # fmt: skip
    shapes: dict[str, Any] = {
        "block_attention": attention,
        "block_layers": LayersShape(config, B * block_size, of_layers),
    }
    if params.fc is not None:
        fc, kv_a = params.fc, params.kv_a_proj
        weights = (("fc", *fc.shape), ("kv_a_proj", kv_a.shape[0] * kv_a.shape[1], kv_a.shape[2]))
        of_context = tuple(sorted({jnp.dtype(fc.dtype).name, *dtypes}))
        shapes["compress_context"] = ProductShape(B * (geometry.max_draft_len + 1), weights, of_context)
    if params.lm_head is not None:
        head = params.lm_head
        of_head = (jnp.dtype(head.dtype).name,)
        shapes["draft_logits"] = ProductShape(B * geometry.max_draft_len, (("lm_head", *head.shape),), of_head)
    return shapes


def shapes_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree, and what is equal for two trees of one structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return leaves, (structure, tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves))


def any_traced(leaves: list[Any]) -> bool:
    """Whether a call with these arrays is inside of a caller's trace."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


class KnownParams:
    """Numbers weights by their shapes; those of the last call, most often the same ones, are known without a look."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._new = itertools.count()
        # written at once: steps may be called by several threads
        self._last: tuple[Callable[[], DrafterParams | None], int, bool] = (lambda: None, -1, False)

    def look(self, params: DrafterParams) -> tuple[int, bool]:
        """A number, equal for weights of one structure, shapes and dtypes, and whether any of the weights is a tracer."""
        known, number, traced = self._last
        if known() is not params:
            leaves, shapes = shapes_of(params)
            number = self._numbers.setdefault(shapes, next(self._new))
            traced = any_traced(leaves)
            self._last = weakref.ref(params), number, traced
        return number, traced


class DecodeStep:
    """`outputs, state = step(params, state, inputs)`: checks what the host can see, then makes one jitted call.

    The state is donated: its pool is updated in place and the old state is gone once the call was accepted. A call that
    raises left it untouched. One compilation per combination of shapes: B, num_contexts, K.
    """

    def __init__(self, config: DrafterConfig, geometry: Geometry, options: StepOptions):
        self.config, self.geometry, self.options = config, geometry, options
        self.compilations = 0
        """How many times the step was traced, once per combination of shapes and dtypes."""

        def counted(params: DrafterParams, changing: Changing, constant: DecodeState, inputs: StepInputs) -> Any:
            self.compilations += 1  # runs while tracing only
            outputs, state = decode_step(params, joined(changing, constant), inputs, options)
            return outputs, split(state)[0]

        self._counted = counted
        self._params = KnownParams()
        self._compiler_options: dict[Any, dict[str, str] | None] = {}
        """By all that `check` looks at, of what has passed it."""
        self._jitted: dict[tuple[SingleDeviceSharding | None, bool], Any] = {}

    def __call__(self, params: DrafterParams, state: DecodeState, inputs: StepInputs) -> tuple[StepOutputs, DecodeState]:
        """Run one step. Raises ValueError or TypeError, before dispatch, for anything the host can see is wrong.

        Inside a `jax.jit` of the caller's, at least one of the arrays must be an argument of it.
        """
        # all that `check` looks at, which takes the host a tenth of a millisecond, but for a number that only equals an integer
        leaves, shapes = shapes_of((state, inputs))
        number, traced = self._params.look(params)
        key = number, shapes
        if type(inputs.num_contexts) is int and key in self._compiler_options:
            check_alive("decode step", state)
        else:
            self.check(params, state, inputs)
            self._compiler_options[key] = self._options_for(params, inputs)
        changing, constant = split(state)
        jitted = self._jitted_for(state, self._compiler_options[key], traced or any_traced(leaves))
        try:
            outputs, changing = jitted(params, changing, constant, inputs)
        except ValueError:
            name_divided("decode step", params=params, inputs=inputs)
            raise
        return outputs, joined(changing, constant)

    def lower(self, params: DrafterParams, state: DecodeState, inputs: StepInputs) -> Any:
        """`jax.stages.Lowered` of the step for these shapes: nothing runs, the state is not touched.

        `step.lower(...).compile()` is the warm-up: later calls with these shapes do not compile again. Abstract values
        (`jax.ShapeDtypeStruct`) do as well as arrays.
        """
        self.check(params, state, inputs)
        traced = any_traced(jax.tree.leaves((params, state, inputs)))
        jitted = self._jitted_for(state, self._options_for(params, inputs), traced)
        return jitted.lower(params, *split(state), inputs)

    def _options_for(self, params: DrafterParams, inputs: StepInputs) -> dict[str, str] | None:
        return step_compiler_options(
            self.options,
            stores_context=inputs.captured is not None and params.fc is not None,
            num_contexts=inputs.num_contexts,
        )

    def _jitted_for(self, state: DecodeState, compiler_options: dict[str, str] | None, traced: bool) -> Any:
        if traced:
            compiler_options = None  # inside a caller's jit they are the caller's
        key = device, _ = device_of(state), compiler_options is not None
        if key not in self._jitted:
            self._jitted[key] = pinned_jit(self._counted, device, donate_argnums=1, compiler_options=compiler_options)
        return self._jitted[key]

    def explain(self, params: DrafterParams, B: int) -> dict[str, str]:
        """For a step of `B` gen rows: the backend of each op, and the reason where it is not the one asked for."""
        shapes = kernel_shapes(params, self.config, self.geometry, B)
        explained = {op: str(path) for op, path in step_paths(params, self.options, B, shapes).items()}
        if self.options.overlap_context_projection:
            why_not = why_no_overlap(self.options, stores_context=params.fc is not None)
            explained["overlap_context_projection"] = f"not taken: {why_not}" if why_not else str(overlap_mechanism())
        return explained

    def check(self, params: DrafterParams, state: DecodeState, inputs: StepInputs) -> None:
        """Raise for whatever the host can see is wrong: shapes, dtypes, a donated state, weights that are not there."""
        call, config, geometry = "decode step", self.config, self.geometry
        if state.config != config or state.geometry != geometry:
            raise ValueError(f"{call}: the state was made for another config or geometry than this step")
        check_state(call, state, params.kv_a_proj.dtype)

        expect(call, "draft_tokens", inputs.draft_tokens, {"B": None, "K": None}, INTEGERS)
        B, K = inputs.draft_tokens.shape
        num_contexts = inputs.num_contexts
        if isinstance(num_contexts, bool) or not isinstance(num_contexts, int) or num_contexts < 0:
            raise ValueError(f"{call}: num_contexts is {num_contexts!r}, expected a Python integer >= 0")
        if num_contexts + B == 0:
            raise ValueError(f"{call}: the batch is empty (num_contexts is 0 and draft_tokens has no row)")
        if geometry.max_batch < B:
            raise ValueError(f"{call}: {B} gen requests, but the geometry has max_batch={geometry.max_batch} slots")
        if geometry.max_draft_len < K:
            raise ValueError(f"{call}: draft_tokens has K={K} drafts per request, max_draft_len is {geometry.max_draft_len}")
        rows = {"num_contexts + B*(K+1)": num_contexts + B * (K + 1), "V": None}
        expect(call, "logits", inputs.logits, rows, FLOATS)
        one_per_row = num_contexts > 0 and getattr(inputs.slots, "shape", None) == (num_contexts + B,)
        expect(call, "slots", inputs.slots, {"num_contexts + B": num_contexts + B} if one_per_row else {"B": B}, INTEGERS)
        check_offsets(call, inputs.encoded_offsets, geometry, num_contexts + B)
        if inputs.captured is not None:
            captured_dims = {"B*(K+1)": B * (K + 1), "T*H_t": config.captured_size}
            expect(call, "captured", inputs.captured, captured_dims, FLOATS)
        self._check_sampling(inputs)
        if self.options.return_confidence and params.confidence_proj is None:
            raise ValueError(f"{call}: return_confidence is set, but the drafter has no confidence head")
        self._check_params(params)
        if B and K:
            self._check_output_head(params, inputs.logits.shape[1])

    def _check_sampling(self, inputs: StepInputs) -> None:
        call, wanted = "decode step", self.options.sampling
        for name in ("sampling", "draft_probabilities"):
            if (getattr(inputs, name) is not None) != wanted:
                state = "missing" if wanted else "there"
                raise ValueError(f"{call}: inputs.{name} is {state}, but the step was made with StepOptions.sampling={wanted}")
        if wanted:
            contracts.accept_sampled(
                inputs.logits, inputs.draft_tokens, inputs.draft_probabilities, inputs.sampling, inputs.num_contexts
            )

    def _check_params(self, params: DrafterParams) -> None:
        call, config = "decode step", self.config
        kv_a_dims: dict[str, int | None] = {"L": config.num_hidden_layers, "D": config.latent_dim, "H": config.hidden_size}
        expect(call, "params.kv_a_proj", params.kv_a_proj, kv_a_dims, FLOATS)
        expect(call, "params.embed_tokens", params.embed_tokens, {"V": None, "H": config.hidden_size}, FLOATS)
        if (params.fc is None) != (params.hidden_norm is None):
            raise ValueError(f"{call}: params.fc and params.hidden_norm come together, one of them is None")
        for name in ("markov_w1", "markov_w2"):
            if (getattr(params, name) is None) != (config.markov_rank == 0):
                state = "missing" if config.markov_rank else "there"
                raise ValueError(f"{call}: params.{name} is {state}, but the config's markov_rank is {config.markov_rank}")

    def _check_output_head(self, params: DrafterParams, target_vocab: int) -> None:
        call, config = "decode step", self.config
        if params.lm_head is None:
            raise ValueError(
                f"{call}: params.lm_head is not set: the output head is the target's, not part of a drafter checkpoint;"
                " use params.with_lm_head(weight) with the target's [V, H]"
            )
        expect(call, "params.lm_head", params.lm_head, {"V": None, "H": config.hidden_size}, FLOATS)
        vocab = params.lm_head.shape[0]
        if not vocab:
            raise ValueError(f"{call}: params.lm_head is {list(params.lm_head.shape)}, expected at least one row")
        if vocab > target_vocab:
            raise ValueError(f"{call}: params.lm_head has {vocab} rows, the target's logits only {target_vocab} columns")
        if params.markov_w2 is not None:
            expect(call, "params.markov_w2", params.markov_w2, {"V (of lm_head)": vocab, "r": None}, FLOATS)


def make_decode_step(config: DrafterConfig, geometry: Geometry, options: StepOptions | None = None) -> DecodeStep:
    """The decode step for one drafter, geometry and set of options.

    Raises:
        ValueError: the geometry does not fit the drafter.
        BackendUnavailable: the options' backend does not run on this machine; says why.
    """
    options = StepOptions() if options is None else options
    geometry.check(config)
    for field in ("backend", "float_backend"):
        backend = getattr(options, field)
        reason = None if backend in ("auto", None) else why_unavailable(backend)
        if reason is not None:
            raise BackendUnavailable(f"make_decode_step: {field}={backend!r} is not available: {reason}")
    return DecodeStep(config, geometry, options)
