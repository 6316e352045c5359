"""What a run carries from step to step: the latent pool and the context lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from .config import DrafterConfig, Geometry
from .ops.checks import INTEGERS, dtype_name, expect
from .params import Array
from .rope import yarn_tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Functional state: a step takes one and returns the next. The one it took is donated, so it is gone."""

    pool: Array
    """`[L, num_pages, P, D]` latents, or `[num_pages, L, P, D]` for a page-major geometry."""
    ctx_len: Array
    """`[max_batch + 1]` int32 context tokens stored per slot; the last is the dummy's, always 0."""
    force_counter: Array
    """int32 scalar: steps that drew a forced acceptance from the fixed pool."""
    rope_cos: Array
    """`[rope_length, qk_rope_head_dim / 2]` fp32; never changes."""
    rope_sin: Array
    config: DrafterConfig = dataclasses.field(metadata={"static": True})
    geometry: Geometry = dataclasses.field(metadata={"static": True})


class Changing(NamedTuple):
    """The part of a state that a call updates, and donates."""

    pool: Array
    ctx_len: Array
    force_counter: Array


def split(state: DecodeState) -> tuple[Changing, DecodeState]:
    """A state as its donated part and the rest: states may share their rope tables."""
    rest = DecodeState(None, None, None, state.rope_cos, state.rope_sin, state.config, state.geometry)
    return Changing(state.pool, state.ctx_len, state.force_counter), rest


def joined(changing: Changing, constant: DecodeState) -> DecodeState:
    """The inverse of `split`."""
    return DecodeState(*changing, constant.rope_cos, constant.rope_sin, constant.config, constant.geometry)


def device_of(state: DecodeState) -> SingleDeviceSharding | None:
    """Where a state lives (the default device for an abstract one); None inside a trace, or for a sharded pool.

    Compiled calls are pinned to it: otherwise JAX compiles anew when an operand that was on no device in particular comes
    back committed to one, as every result is.
    """
    if isinstance(state.pool, jax.core.Tracer):
        return None
    sharding = getattr(state.pool, "sharding", None)
    if sharding is None:
        default = jax.config.jax_default_device or jax.devices()[0]
        return SingleDeviceSharding(jax.devices(default)[0] if isinstance(default, str) else default)
    return sharding if isinstance(sharding, SingleDeviceSharding) else None


def pinned_jit(function: Callable[..., Any], device: SingleDeviceSharding | None, **options: Any) -> Any:
    """`jax.jit` with every operand and result on one device, or left to JAX for None."""
    placement: dict[str, Any] = {} if device is None else {"in_shardings": device, "out_shardings": device}
    return jax.jit(function, **placement, **options)


def name_divided(caller: str, **operands: Any) -> None:
    """Raise for the first array that is divided among devices: what a compiled call of one device says names none."""
    for name, operand in operands.items():
        for path, array in jax.tree_util.tree_leaves_with_path(operand):
            if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and not array.is_fully_replicated:
                raise ValueError(
                    f"{caller}: {name}{jax.tree_util.keystr(path)} is divided among {len(array.sharding.device_set)} devices,"
                    " expected it whole on the state's device: jax.device_put(array, device)"
                )


def pool_shape(config: DrafterConfig, geometry: Geometry) -> tuple[int, int, int, int]:
    """The latent pool's shape in the geometry's layout."""
    layers, pages = config.num_hidden_layers, geometry.num_pages
    outer = (layers, pages) if geometry.layout == "layer_major" else (pages, layers)
    return (*outer, geometry.page_size, config.latent_dim)


def init_state(config: DrafterConfig, geometry: Geometry, *, dtype: Any = jnp.bfloat16) -> DecodeState:
    """An empty state: a zeroed pool of the weights' `dtype`, no context in any slot, the YaRN tables.

    Raises ValueError if the geometry does not fit the drafter.
    """
    geometry.check(config)
    cos, sin = yarn_tables(config, geometry.rope_length(config))
    return DecodeState(
        pool=jnp.zeros(pool_shape(config, geometry), dtype),
        ctx_len=jnp.zeros(geometry.max_batch + 1, jnp.int32),
        force_counter=jnp.zeros((), jnp.int32),
        rope_cos=jnp.asarray(cos),
        rope_sin=jnp.asarray(sin),
        config=config,
        geometry=geometry,
    )


def check_alive(caller: str, state: DecodeState) -> None:
    """Raise before dispatch if a state was donated already."""
    for name in ("pool", "ctx_len", "force_counter", "rope_cos", "rope_sin"):
        array = getattr(state, name)
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise ValueError(f"{caller}: state.{name} was donated to an earlier call; use the state that call returned")


def check_state(caller: str, state: DecodeState, weights_dtype: Any) -> None:
    """Raise before dispatch if a state cannot be used: donated already, or of another geometry or dtype."""
    config, geometry = state.config, state.geometry
    check_alive(caller, state)
    expected = {
        "pool": (pool_shape(config, geometry), str(jnp.dtype(weights_dtype))),
        "ctx_len": ((geometry.max_batch + 1,), "int32"),
        "force_counter": ((), "int32"),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(state, name)
        if tuple(array.shape) != shape or dtype_name(array) != dtype:
            raise ValueError(
                f"{caller}: state.{name} is {dtype_name(array)}{list(array.shape)}, expected {dtype}{list(shape)}"
                " (init_state takes the weights' dtype)"
            )
    rows = geometry.rope_length(config)
    for name in ("rope_cos", "rope_sin"):
        table = getattr(state, name)
        if table.ndim != 2 or table.shape[0] < rows or table.shape[1] * 2 != config.qk_rope_head_dim:
            raise ValueError(
                f"{caller}: max_ctx {geometry.max_ctx} is beyond the rope table: state.{name} has shape"
                f" {list(table.shape)}, expected at least [{rows}, {config.qk_rope_head_dim // 2}]"
            )


def check_offsets(caller: str, encoded_offsets: Any, geometry: Geometry, rows: int) -> None:
    """Raise unless a page manager's table `[pools, seqs, 2, max_blocks]` has this geometry's pool and a batch's `rows`."""
    dims = {"pools": None, "seqs": None, "2": 2, "max_blocks_per_seq": geometry.max_blocks_per_seq}
    expect(caller, "encoded_offsets", encoded_offsets, dims, INTEGERS)
    pools, seqs = encoded_offsets.shape[:2]
    if geometry.pool_idx >= pools:
        raise ValueError(f"{caller}: encoded_offsets has {pools} pools, the geometry's pool_idx is {geometry.pool_idx}")
    if rows > seqs:
        raise ValueError(f"{caller}: encoded_offsets has {seqs} rows, the batch has {rows}")
