"""Storing a prompt's context: its own jitted function, bucketed by token count."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from . import ops
from .drafter import project_context
from .ops.backends import FloatBackends
from .ops.checks import FLOATS, INTEGERS, expect
from .ops.safety import safe_block_counts, safe_slots
from .params import DrafterParams
from .state import Changing, DecodeState, check_offsets, check_state, device_of, joined, name_divided, pinned_jit, split

SMALLEST_BUCKET = 16


def token_bucket(num_tokens: int) -> int:
    """The padded token count: the next power of two, at least 16."""
    return max(SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())


@functools.cache
def jitted_store(device: SingleDeviceSharding | None, backend: str, float_backend: str | None = None) -> Any:
    """The compiled store for states on one device."""
    return pinned_jit(functools.partial(_store, backend, float_backend or backend), device, donate_argnums=1)


def _store(
    backend: str,
    float_backend: str,
    params: DrafterParams,
    changing: Changing,
    constant: DecodeState,
    captured: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    encoded_offsets: jax.Array,
) -> Changing:
    state = joined(changing, constant)
    config, geometry = state.config, state.geometry
    num_contexts = slots.shape[0]
    block_tables, block_counts = ops.refresh_block_tables(
        encoded_offsets,
        pool_idx=geometry.pool_idx,
        num_seqs=num_contexts,
        divisor=geometry.offset_divisor,
        backend=backend,
    )
    # A row with a token past its pages or past max_ctx is refused whole: a truncated context would be drafted from as if
    # it were complete. So is a row without a slot. Nothing is ever redirected.
    slots = safe_slots(slots, state.ctx_len)
    known = (rows >= 0) & (rows < num_contexts)
    row = jnp.where(known, rows, 0)
    owned = safe_block_counts(block_counts, geometry.max_blocks_per_seq) * geometry.page_size
    limit = jnp.where(slots == geometry.dummy_slot, 0, jnp.minimum(owned, geometry.max_ctx))
    fits = (positions >= 0) & (positions < limit[row])
    row_fits = jnp.ones(num_contexts, bool).at[row].min(fits | ~known)
    stored = known & row_fits[row]

    backends = FloatBackends.of(float_backend)
    latents = project_context(params, config, captured, positions, state.rope_cos, state.rope_sin, backends=backends)
    pool = ops.scatter_context(
        state.pool, latents, jnp.where(stored, rows, -1), positions, block_tables, layout=geometry.layout, backend=backend
    )
    chunk_end = jnp.zeros(num_contexts, jnp.int32).at[row].max(jnp.where(stored, positions + 1, 0))
    has_tokens = jnp.zeros(num_contexts, bool).at[row].max(known)
    # a row without tokens keeps its slot's length: its write goes out of bounds and is dropped
    target = jnp.where(has_tokens, slots, state.ctx_len.shape[0])
    ctx_len = state.ctx_len.at[target].set(chunk_end, mode="drop").at[geometry.dummy_slot].set(0)
    return changing._replace(pool=pool, ctx_len=ctx_len)


def _padded(array: Any, length: int, fill: int) -> Any:
    """`array` padded along its first axis, in NumPy if it lives on the host, else on its device."""
    xp = np if isinstance(array, np.ndarray) else jnp
    widths = [(0, length - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return xp.pad(array, widths, constant_values=fill)


def store_prefill_context(
    params: DrafterParams,
    state: DecodeState,
    *,
    captured: Any,
    positions: Any,
    rows: Any,
    slots: Any,
    encoded_offsets: Any,
    backend: str = "xla",
    float_backend: str | None = None,
) -> DecodeState:
    """Project a prompt chunk's captured hidden states and store their latents in its requests' pages.

    Call it for the context rows before the decode step whose batch has them, once per chunk. It sets each slot's
    context length to the end of the chunk (its last position + 1), so that a chunk starting at position 0 resets a
    reused slot and a later one appends. Compiles once per token bucket (powers of two) and number of rows.

    Args:
        captured: `[N, T*H_t]`, the chunks' tokens one after another. On a device, come padded to a bucket (a power of
            two, rows -1): otherwise XLA compiles a small pad for every new N.
        positions: `[N]` int32, position of each token in its sequence.
        rows: `[N]` int32, the batch row of each token, `0 .. num_contexts-1`; -1 is padding.
        slots: `[num_contexts]` int32. A row in the dummy slot (a refused request) stores nothing.
        encoded_offsets: `[pools, seqs, 2, max_blocks]` int32, see `refresh_block_tables`.
        backend: of every op, norm and rope included: the one that the step's options name, `"xla"` for `auto`. `"pallas"` has
            its products, whose kernels are for a step's few rows, from XLA.
        float_backend: of the floating-point ops, where the step's options name one.

    Returns:
        The state; the one passed in is donated. A row with a token past its pages or past `max_ctx` stores nothing and
        its slot's length becomes 0, so that it drafts from nothing instead of from a truncated context.
        `RequestSlots.admit_chunk` refuses such a chunk up front, with a warning.

    Raises:
        TypeError, ValueError: wrong dtype or shape, an empty chunk, a drafter without `fc`; the state is untouched.
    """
    call, geometry = "store_prefill_context", state.geometry
    check_state(call, state, params.kv_a_proj.dtype)
    if params.fc is None or params.hidden_norm is None:
        raise ValueError(f"{call}: the drafter has no fc / hidden_norm, so there is no context to store")
    expect(call, "captured", captured, {"N": None, "T*H_t": state.config.captured_size}, FLOATS)
    num_tokens = captured.shape[0]
    if num_tokens == 0:
        raise ValueError(f"{call}: captured has no rows; an empty chunk stores nothing, so do not call")
    expect(call, "positions", positions, {"N": num_tokens}, INTEGERS)
    expect(call, "rows", rows, {"N": num_tokens}, INTEGERS)
    expect(call, "slots", slots, {"num_contexts": None}, INTEGERS)
    num_contexts = slots.shape[0]
    if num_contexts == 0:
        raise ValueError(f"{call}: slots is empty, expected one slot per context row")
    check_offsets(call, encoded_offsets, geometry, num_contexts)
    for name, values in (("positions", positions), ("rows", rows)):
        if isinstance(values, np.ndarray) and values.size and (values.min() < (0 if name == "positions" else -1)):
            raise ValueError(f"{call}: {name} holds {values.min()}, expected no negative value{' below -1' * (name == 'rows')}")
    if isinstance(rows, np.ndarray) and rows.max() >= num_contexts:
        raise ValueError(f"{call}: rows names row {rows.max()}, but slots has {num_contexts} rows")

    length = token_bucket(num_tokens)
    padded = (_padded(captured, length, 0), _padded(positions, length, 0), _padded(rows, length, -1))
    changing, constant = split(state)
    jitted = jitted_store(device_of(state), backend, float_backend)
    try:
        changing = jitted(params, changing, constant, *padded, slots, encoded_offsets)
    except ValueError:
        name_divided(
            call, params=params, captured=captured, positions=positions, rows=rows, slots=slots,
            encoded_offsets=encoded_offsets,
        )  # fmt: skip
        raise
    return joined(changing, constant)
