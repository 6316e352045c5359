"""The torch twin of the whole decode step: the eager chain in the order of `jdspark.step.decode_step`.

It takes and returns the same dataclasses, holding torch tensors; the state is updated in place.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import torch

from jdspark.config import DrafterConfig, StepOptions
from jdspark.ops import BlockPlacement, Prologue
from jdspark.ops.accept_strict import advances_force_counter
from jdspark.params import DrafterParams, LayerParams
from jdspark.paths import why_no_overlap
from jdspark.rope import softmax_scale
from jdspark.state import DecodeState
from jdspark.step import Intermediates, StepInputs, StepOutputs

from . import eager
from .bridge import to_torch
from .eager.advance_ctx_len import advertised_ctx_len
from .eager.rope import at_positions
from .eager.safety import safe_block_counts, safe_slots
from .forked import Forked


def as_torch(tree: Any) -> Any:
    """A copy of params, state, inputs or outputs with every JAX or NumPy array as a torch tensor of its own."""

    def convert(leaf: Any) -> torch.Tensor:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        return to_torch(leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf), copy=True)

    return jax.tree.map(convert, tree)


def float_ops(options: StepOptions) -> Any:
    """The module of a step's floating-point ops: the Triton kernels if JAX takes them from there, else the eager chain."""
    triton = (options.float_backend or options.backend) == "triton"
    return importlib.import_module("torch_bridge.triton_kernels") if triton else eager


def compress_context(params: DrafterParams, state: DecodeState, captured: torch.Tensor, ops: Any = eager) -> torch.Tensor:
    """`hidden_norm(fc(captured))` times every layer's `kv_a_proj`: `[N, L, D]`. `ops`: see `float_ops`, here and below."""
    assert params.fc is not None
    assert params.hidden_norm is not None
    projected = ops.rms_norm(ops.linear(captured, params.fc), params.hidden_norm, state.config.rms_norm_eps)
    num_layers, width, _ = params.kv_a_proj.shape
    return ops.linear(projected, params.kv_a_proj.flatten(0, 1)).unflatten(-1, (num_layers, width))


def finished_latents(
    params: DrafterParams, state: DecodeState, compressed: torch.Tensor, positions: torch.Tensor, ops: Any = eager
) -> torch.Tensor:
    """Norm and rope of `compress_context`'s result: the latents to store, `[N, L, D]`."""
    eps = state.config.rms_norm_eps
    return ops.norm_rope(compressed, positions, params.kv_a_layernorm, state.rope_cos, state.rope_sin, eps=eps)


def absorbed_query(
    layer: LayerParams, config: DrafterConfig, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ops: Any = eager
) -> torch.Tensor:
    """`[B, block, H]` -> `[B, block, heads, D]`."""
    q_a = ops.rms_norm(ops.linear(h, layer.q_a_proj), layer.q_a_layernorm, config.rms_norm_eps)
    q = ops.linear(q_a, layer.q_b_proj).unflatten(-1, (config.num_attention_heads, -1))
    q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    return torch.cat([ops.head_product(q_nope, layer.k_b), ops.rope(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))], dim=-1)


def mlp(layer: LayerParams, h: torch.Tensor, *, residual: torch.Tensor, ops: Any = eager) -> torch.Tensor:
    """`residual +` SwiGLU."""
    gate, up = ops.linear(h, layer.gate_proj), ops.linear(h, layer.up_proj)
    return ops.linear(ops.swiglu(gate, up), layer.down_proj, residual=residual)


def draft_block(
    params: DrafterParams,
    state: DecodeState,
    noise: torch.Tensor,
    query_positions: torch.Tensor,
    placement: BlockPlacement,
    advertised: torch.Tensor,
    ops: Any = eager,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's hidden states `[B, block_size, H]` and latents `[L, B, block_size, D]`."""
    config, geometry = state.config, state.geometry
    eps = config.rms_norm_eps
    cos, sin = at_positions(state.rope_cos, query_positions), at_positions(state.rope_sin, query_positions)
    h = noise
    latents = []
    for index, layer in enumerate(params.layers):
        x = ops.rms_norm(h, layer.input_layernorm, eps)
        query = absorbed_query(layer, config, x, cos, sin, ops)
        compressed = ops.linear(x, params.kv_a_proj[index])
        latent = ops.norm_rope(
            compressed.reshape(-1, 1, config.latent_dim),
            query_positions.reshape(-1),
            params.kv_a_layernorm[index : index + 1],
            state.rope_cos,
            state.rope_sin,
            eps=eps,
        ).reshape(compressed.shape)
        latents.append(latent)
        attended = ops.block_attention(
            query,
            latent,
            state.pool,
            placement.page_tables,
            advertised,
            layer=index,
            scale=softmax_scale(config),
            kv_lora_rank=config.kv_lora_rank,
            layout=geometry.layout,
        )
        values = ops.head_product(attended, layer.v_b, transposed=True)
        h = ops.linear(values.flatten(-2), layer.o_proj, residual=h)
        h = mlp(layer, ops.rms_norm(h, layer.post_attention_layernorm, eps), residual=h, ops=ops)
    return ops.rms_norm(h, params.norm, eps), torch.stack(latents)


def prepare_with_eager_chain(
    state: DecodeState,
    inputs: StepInputs,
    gen_accepted_tokens: torch.Tensor,
    gen_num_accepted: torch.Tensor,
    latents_at: Callable[[torch.Tensor], torch.Tensor] | None,
) -> tuple[Prologue, torch.Tensor, BlockPlacement]:
    """The unfused bookkeeping, op by op: prologue, advertised lengths and placement; stores and advances in place."""
    config, geometry, num_contexts = state.config, state.geometry, inputs.num_contexts
    block_size = config.block_width(geometry.max_draft_len)
    block_tables, block_counts = eager.refresh_block_tables(
        inputs.encoded_offsets,
        pool_idx=geometry.pool_idx,
        num_seqs=num_contexts + inputs.slots.shape[0],
        divisor=geometry.offset_divisor,
    )
    prologue = eager.gen_prologue(
        gen_accepted_tokens,
        gen_num_accepted,
        state.ctx_len,
        inputs.slots,
        block_size=block_size,
        max_ctx=geometry.max_ctx,
        mask_token_id=config.mask_token_id,
    )
    room = {"page_size": geometry.page_size, "block_size": block_size, "max_ctx": geometry.max_ctx}
    if latents_at is not None:
        eager.store_gen_context(
            state.pool,
            latents_at(prologue.context_positions.reshape(-1)),
            state.ctx_len,
            inputs.slots,
            gen_num_accepted,
            block_tables,
            block_counts,
            layout=geometry.layout,
            first_row=num_contexts,
        )
        _, advertised = eager.advance_ctx_len(
            state.ctx_len, inputs.slots, gen_num_accepted, block_counts, **room, first_row=num_contexts
        )
    else:
        advertised = advertised_ctx_len(state.ctx_len, inputs.slots, block_counts[num_contexts:], **room)
    placement = eager.block_placement(
        advertised,
        block_tables,
        block_size=block_size,
        page_size=geometry.page_size,
        first_row=num_contexts,
        block_counts=block_counts,
    )
    return prologue, advertised, placement


def prepare_with_triton(
    state: DecodeState,
    inputs: StepInputs,
    gen_accepted_tokens: torch.Tensor,
    gen_num_accepted: torch.Tensor,
    latents_at: Callable[[torch.Tensor], torch.Tensor] | None,
) -> tuple[Prologue, torch.Tensor, BlockPlacement]:
    """The same in two kernels, `prepare_step` and `store_prepared`, and a zeroed counter."""
    from . import triton_kernels

    config, geometry = state.config, state.geometry
    prepared = triton_kernels.prepare_step(
        inputs.encoded_offsets,
        gen_accepted_tokens,
        gen_num_accepted,
        state.ctx_len,
        inputs.slots,
        pool_idx=geometry.pool_idx,
        divisor=geometry.offset_divisor,
        page_size=geometry.page_size,
        block_size=config.block_width(geometry.max_draft_len),
        max_ctx=geometry.max_ctx,
        mask_token_id=config.mask_token_id,
        num_contexts=inputs.num_contexts,
        advance=latents_at is not None,
    )
    if latents_at is not None:
        triton_kernels.store_prepared(
            state.pool,
            latents_at(prepared.prologue.context_positions.reshape(-1)),
            gen_num_accepted,
            prepared.store_pages,
            prepared.store_offsets,
            layout=geometry.layout,
        )
    return prepared.prologue, prepared.advertised, prepared.placement


def decode_step(
    params: DrafterParams,
    state: DecodeState,
    inputs: StepInputs,
    options: StepOptions | None = None,
    *,
    given: Intermediates | None = None,
) -> tuple[StepOutputs, DecodeState]:
    """One decode step on torch tensors; see `jdspark.step.decode_step`.

    With `options.fused_prologue` the bookkeeping and the exact ops around it run as Triton kernels, else as the eager
    chain; the floating-point ops run where `float_ops` says. With `options.overlap_context_projection` the context is
    compressed on a side stream beside the acceptance, joined before norm, rope and the store (`why_no_overlap` says when
    not). Nothing waits for the device, so a CUDA graph can capture the step (a fractional `options.force` aside).

    Args:
        given: floating-point results to use instead of computing them. Then only the exact ops are left, and the whole
            step, pool included, must agree with whoever computed them in every bit.

    Returns:
        The outputs and `state` itself, updated in place.
    """
    options = StepOptions() if options is None else options
    config, geometry = state.config, state.geometry
    B, K = inputs.draft_tokens.shape
    num_contexts = inputs.num_contexts
    inputs = dataclasses.replace(inputs, slots=inputs.slots[inputs.slots.shape[0] - B :])
    fused = options.fused_prologue and B > 0
    kernels: Any = importlib.import_module("torch_bridge.triton_kernels") if fused else eager
    prepare = prepare_with_triton if fused else prepare_with_eager_chain
    float_kernels = float_ops(options)

    stores_context = inputs.captured is not None and params.fc is not None and B > 0

    def compress() -> torch.Tensor:
        return compress_context(params, state, inputs.captured, float_kernels)

    early = None
    if stores_context and given is None and not why_no_overlap(options, num_contexts=num_contexts):
        early = Forked(compress, inputs.captured.device)

    accepted_tokens, num_accepted = kernels.accept_strict(
        inputs.logits,
        inputs.draft_tokens,
        num_contexts=num_contexts,
        force=options.force,
        force_counter=state.force_counter,
    )
    if advances_force_counter(options.force, K):
        state.force_counter.add_(1)
    gen_num_accepted = num_accepted[num_contexts:]

    floats: dict[str, Any] = {"context_latents": None}

    def context_latents_at(positions: torch.Tensor) -> torch.Tensor:
        if given is None:
            compressed = compress() if early is None else early.join()
            floats["context_latents"] = finished_latents(params, state, compressed, positions, float_kernels)
        else:
            floats["context_latents"] = _present(given.context_latents)
        return floats["context_latents"]

    prologue, advertised, placement = prepare(
        state,
        inputs,
        accepted_tokens[num_contexts:],
        gen_num_accepted,
        context_latents_at if stores_context else None,
    )
    draft_tokens = torch.zeros((B, K), dtype=torch.int32, device=inputs.logits.device)
    if K > 0 and B > 0:
        noise = kernels.noise_block(
            params.embed_tokens,
            prologue.bonus,
            block_size=placement.pages.shape[1],
            mask_token_id=config.mask_token_id,
            mask_row=params.mask_token_embedding,
        )
        if given is None:
            block_hidden, block_latents = draft_block(
                params, state, noise, prologue.query_positions, placement, advertised, float_kernels
            )
            assert params.lm_head is not None
            first = config.first_draft_slot
            logits = float_kernels.linear(block_hidden[:, first : first + K], params.lm_head).float()
            base_logits = logits
            if params.markov_w1 is None or params.markov_w2 is None:
                draft_tokens = logits.argmax(dim=-1).to(torch.int32)
            else:
                logits, draft_tokens = float_kernels.markov_chain(
                    base_logits, prologue.bonus, params.markov_w1, params.markov_w2
                )
        else:
            block_hidden, block_latents = _present(given.block_hidden), _present(given.block_latents)
            base_logits, logits = _present(given.base_logits), _present(given.draft_logits)
            draft_tokens = logits.argmax(dim=-1).to(torch.int32)
        kernels.write_block_latents(state.pool, block_latents, placement, layout=geometry.layout)
        floats |= {
            "block_latents": block_latents,
            "block_hidden": block_hidden,
            "base_logits": base_logits,
            "draft_logits": logits,
        }

    outputs = StepOutputs(
        accepted_tokens=accepted_tokens,
        num_accepted=num_accepted,
        draft_tokens=draft_tokens,
        next_tokens=kernels.next_tokens(accepted_tokens, num_accepted, draft_tokens),
        kv_rewind=1 - gen_num_accepted,
        target_seq_lens=torch.full((B,), K + 1, dtype=torch.int32, device=inputs.logits.device),
        advertised=advertised,
        intermediates=Intermediates(**floats),
    )
    return outputs, state


def _present(part: Any) -> torch.Tensor:
    if part is None:
        raise ValueError("decode_step: `given` lacks a part; make it with StepOptions(return_intermediates=True)")
    return part


def store_prefill_context(
    params: DrafterParams,
    state: DecodeState,
    *,
    captured: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    encoded_offsets: torch.Tensor,
    given: torch.Tensor | None = None,
    ops: Any = eager,
) -> DecodeState:
    """Store a prompt chunk's context in place; see `jdspark.store_prefill_context`.

    Args:
        ops: see `float_ops`.
        given: `[N, L, D]` latents to store instead of computing them.
    """
    geometry, num_contexts = state.geometry, slots.shape[0]
    block_tables, block_counts = eager.refresh_block_tables(
        encoded_offsets, pool_idx=geometry.pool_idx, num_seqs=num_contexts, divisor=geometry.offset_divisor
    )
    slots, rows, positions = safe_slots(slots, state.ctx_len), rows.long(), positions.long()
    limit = (safe_block_counts(block_counts, geometry.max_blocks_per_seq) * geometry.page_size).clamp(max=geometry.max_ctx)
    limit = torch.where(slots == geometry.dummy_slot, 0, limit)
    latents = given
    if latents is None:
        latents = finished_latents(params, state, compress_context(params, state, captured, ops), positions, ops)
    for row in range(num_contexts):
        of_row = rows == row
        if not bool(of_row.any()):
            continue
        chunk = positions[of_row]
        fits = bool(((chunk >= 0) & (chunk < limit[row])).all())
        if fits:
            eager.scatter_context(state.pool, latents[of_row], rows[of_row], chunk, block_tables, layout=geometry.layout)
        if int(slots[row]) != geometry.dummy_slot:
            state.ctx_len[slots[row]] = int(chunk.max()) + 1 if fits else 0
    return state
