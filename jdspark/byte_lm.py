"""A small byte-level language model in plain JAX: the target that the shipped drafter was trained for.

Decoder-only, pre-norm, rotary attention, SwiGLU, untied output head. Tokens are the 256 byte values, a document start and a
mask. `ByteTarget` is the model as the engine's `Target`; it shows what such a target has to do.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .checkpoint import CheckpointError, read_json
from .drafter import linear
from .ops.checks import expect_number
from .ops.norm_rope import at_positions, rms_norm, rope
from .params import Array

START = 256
"""Token id of a document's start: every prompt begins with it."""
MASK = 257
"""Token id of the drafter's mask; never in a text."""


def encode(text: str | bytes) -> list[int]:
    """A document's tokens: its start, then its bytes (UTF-8)."""
    return [START, *(text.encode() if isinstance(text, str) else text)]


def decode(tokens: Sequence[int]) -> bytes:
    """The bytes of generated tokens; ids that stand for no byte are left out."""
    return bytes(token for token in tokens if token < START)


@dataclasses.dataclass(frozen=True)
class ByteLMConfig:
    """The model's sizes, as in its `config.json`. Raises ValueError or TypeError naming a field that makes no model."""

    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    intermediate_size: int = 640
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    vocab_size: int = 258
    target_layer_ids: tuple[int, ...] = (1, 4, 7)
    """Layers whose output a drafter reads, counted from 0."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "vocab_size"):  # fmt: skip
            expect_number("ByteLMConfig", name, getattr(self, name), 1)
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"ByteLMConfig: hidden_size is {self.hidden_size}, expected a multiple of 2 * num_attention_heads"
                f" ({2 * self.num_attention_heads}): rotary positions turn pairs of a head's numbers"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"ByteLMConfig: {name} is {value!r}, expected a number above 0")
        if not isinstance(self.target_layer_ids, tuple) or not self.target_layer_ids:
            raise TypeError(f"ByteLMConfig: target_layer_ids is {self.target_layer_ids!r}, expected a tuple of layers")
        for layer in self.target_layer_ids:
            expect_number("ByteLMConfig", "target_layer_ids", layer, 0, self.num_hidden_layers - 1)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def captured_size(self) -> int:
        """Width of a captured row: the chosen layers' outputs side by side."""
        return len(self.target_layer_ids) * self.hidden_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByteLMLayer:
    """One decoder layer, `y = x @ w.T`."""

    input_layernorm: Array
    """`[H]`"""
    qkv_proj: Array
    """`[3 H, H]`"""
    o_proj: Array
    """`[H, H]`"""
    post_attention_layernorm: Array
    """`[H]`"""
    gate_up_proj: Array
    """`[2 intermediate, H]`"""
    down_proj: Array
    """`[H, intermediate]`"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByteLMParams:
    """All weights."""

    embed_tokens: Array
    """`[V, H]`"""
    layers: tuple[ByteLMLayer, ...]
    norm: Array
    """`[H]`"""
    lm_head: Array
    """`[V, H]`"""


def tensor_shapes(config: ByteLMConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name in the checkpoint, which is its path in `ByteLMParams`."""
    hidden, wide = config.hidden_size, config.intermediate_size
    layer = {
        "input_layernorm": (hidden,),
        "qkv_proj": (3 * hidden, hidden),
        "o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "gate_up_proj": (2 * wide, hidden),
        "down_proj": (hidden, wide),
    }
    shapes = {"embed_tokens": (config.vocab_size, hidden), "norm": (hidden,), "lm_head": (config.vocab_size, hidden)}
    return shapes | {
        f"layers.{index}.{name}": shape for index in range(config.num_hidden_layers) for name, shape in layer.items()
    }


def assemble(config: ByteLMConfig, tensors: dict[str, Any]) -> ByteLMParams:
    """The pytree of tensors named as in `tensor_shapes`."""
    fields = [field.name for field in dataclasses.fields(ByteLMLayer)]
    layers = tuple(
        ByteLMLayer(**{name: tensors[f"layers.{index}.{name}"] for name in fields}) for index in range(config.num_hidden_layers)
    )
    return ByteLMParams(tensors["embed_tokens"], layers, tensors["norm"], tensors["lm_head"])


def named(params: ByteLMParams) -> dict[str, Any]:
    """The inverse of `assemble`."""
    tensors = {"embed_tokens": params.embed_tokens, "norm": params.norm, "lm_head": params.lm_head}
    for index, layer in enumerate(params.layers):
        tensors |= {f"layers.{index}.{field.name}": getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return tensors


def init_byte_lm(config: ByteLMConfig, seed: int) -> ByteLMParams:
    """Random fp32 weights: norms 1, matrices normal with std 0.02, those that end a residual branch `/ sqrt(2 layers)`."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if name.endswith(("o_proj", "down_proj")) else 0.02
        return jnp.asarray(std * rng.standard_normal(shape), jnp.float32)

    return assemble(config, {name: draw(name, shape) for name, shape in tensor_shapes(config).items()})


Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""`attend(layer, q, k, v)`, each `[B, T, heads, head_dim]`, rotated -> `[B, T, heads, head_dim]`."""


def rope_tables(config: ByteLMConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of positions `0 .. length-1`: `[length, head_dim / 2]` fp32, from float64."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def forward(
    params: ByteLMParams, config: ByteLMConfig, tokens: jax.Array, positions: jax.Array, attend: Attend
) -> tuple[jax.Array, jax.Array]:
    """Every layer over `tokens [B, T]` at `positions [B, T]`.

    Returns:
        hidden states after the final norm `[B, T, H]` and the captured ones `[B, T, T_l*H]`, the outputs of
        `target_layer_ids` side by side.
    """
    tables = rope_tables(config, config.max_position_embeddings)
    cos, sin = (at_positions(jnp.asarray(table), positions)[:, :, None] for table in tables)
    h = params.embed_tokens[tokens]
    captured = {}
    for index, layer in enumerate(params.layers):
        x = linear(rms_norm(h, layer.input_layernorm, config.rms_norm_eps), layer.qkv_proj)
        q, k, v = jnp.split(x.reshape(*x.shape[:2], 3 * config.num_attention_heads, config.head_dim), 3, axis=2)
        attended = attend(index, rope(q, cos, sin), rope(k, cos, sin), v)
        h = h + linear(attended.reshape(h.shape), layer.o_proj)
        x = linear(rms_norm(h, layer.post_attention_layernorm, config.rms_norm_eps), layer.gate_up_proj)
        gate, up = jnp.split(x, 2, axis=-1)
        h = h + linear(jax.nn.silu(gate) * up, layer.down_proj)
        if index in config.target_layer_ids:
            captured[index] = h
    rows = jnp.concatenate([captured[layer] for layer in config.target_layer_ids], axis=-1)
    return rms_norm(h, params.norm, config.rms_norm_eps), rows


def logits(params: ByteLMParams, hidden: jax.Array) -> jax.Array:
    """`[..., H]` -> `[..., V]` fp32."""
    return linear(hidden, params.lm_head).astype(jnp.float32)


def causal_forward(params: ByteLMParams, config: ByteLMConfig, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`forward` over whole sequences `[B, T]` from position 0, without a cache: for training."""

    def attend(_: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(params, config, tokens, positions, attend)


Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer the keys and the values, `[num_slots, max_len, heads, head_dim]`."""


def cached_forward(
    params: ByteLMParams, config: ByteLMConfig, cache: Cache, tokens: jax.Array, start: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array, Cache]:
    """`forward` over `tokens [B, T]` at positions `start [B] + t`, after what `slots [B]` of the cache hold before them.

    Every key a query reads was written by this call or lies before `start`; positions past the cache write nothing.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    updated: list[tuple[jax.Array, jax.Array]] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys, values = (
            held.at[slots[:, None], positions].set(new, mode="drop") for held, new in zip(cache[layer], (k, v), strict=True)
        )
        updated.append((keys, values))
        visible = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        return jax.nn.dot_product_attention(q, keys[slots], values[slots], mask=visible, implementation="xla")

    hidden, captured = forward(params, config, tokens, positions, attend)
    return hidden, captured, tuple(updated)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    params: ByteLMParams, config: ByteLMConfig, cache: Cache, tokens: Array, start: Array, num_tokens: Array, slots: Array
) -> tuple[jax.Array, jax.Array, Cache]:
    hidden, captured, cache = cached_forward(params, config, cache, tokens, start, slots)
    last = jnp.take_along_axis(hidden, jnp.maximum(num_tokens - 1, 0)[:, None, None], axis=1)[:, 0]
    return logits(params, last), captured, cache


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _verify(
    params: ByteLMParams, config: ByteLMConfig, cache: Cache, tokens: Array, start: Array, slots: Array
) -> tuple[jax.Array, jax.Array, Cache]:
    hidden, captured, cache = cached_forward(params, config, cache, tokens, start, slots)
    return logits(params, hidden), captured, cache


class ByteTarget:
    """The byte-level model as the engine's `Target`: prefill, verify and a KV cache by slot."""

    def __init__(self, config: ByteLMConfig, params: ByteLMParams):
        self.config, self.params = config, params
        self.vocab_size, self.captured_size = config.vocab_size, config.captured_size
        self.lm_head = params.lm_head

    def init_cache(self, num_slots: int, max_len: int) -> Cache:
        """Zeros for `num_slots` sequences of up to `max_len` tokens; ValueError past the model's positions."""
        if max_len > self.config.max_position_embeddings:
            raise ValueError(f"ByteTarget: max_len is {max_len}, the model has {self.config.max_position_embeddings} positions")
        shape = (num_slots, max_len, self.config.num_attention_heads, self.config.head_dim)
        dtype = self.params.embed_tokens.dtype
        return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in self.params.layers)

    def prefill(
        self, cache: Cache, tokens: Array, start: Array, num_tokens: Array, slots: Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """See `Target.prefill`."""
        return _prefill(self.params, self.config, cache, tokens, start, num_tokens, slots)

    def verify(self, cache: Cache, tokens: Array, start: Array, slots: Array) -> tuple[jax.Array, jax.Array, Cache]:
        """See `Target.verify`."""
        return _verify(self.params, self.config, cache, tokens, start, slots)


def save_byte_lm(path: str | os.PathLike[str], config: ByteLMConfig, params: ByteLMParams) -> None:
    """Write `config.json` and `model.safetensors` into the folder `path`."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.asarray(weight) for name, weight in named(params).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")


def load_byte_lm(path: str | os.PathLike[str], *, dtype: str | None = None) -> tuple[ByteLMConfig, ByteLMParams]:
    """Load what `save_byte_lm` wrote, cast to `dtype` if given. Raises CheckpointError naming the tensor or field."""
    folder = Path(path)
    fields = read_json(folder / "config.json")
    unknown = set(fields) ^ {field.name for field in dataclasses.fields(ByteLMConfig)}
    if unknown:
        raise CheckpointError(f"{folder / 'config.json'}: missing or unknown fields: {', '.join(sorted(unknown))}")
    layers = fields["target_layer_ids"]
    try:
        config = ByteLMConfig(**fields | {"target_layer_ids": tuple(layers) if isinstance(layers, list) else layers})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    shapes, file = tensor_shapes(config), folder / "model.safetensors"
    try:
        with safe_open(file, framework="numpy") as stored:
            names = set(stored.keys())
            if names != set(shapes):
                raise CheckpointError(f"{file}: missing or unknown tensors: {', '.join(sorted(names ^ set(shapes)))}")
            tensors = {name: jnp.asarray(stored.get_tensor(name), dtype=dtype) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    wrong = [f"{name} has shape {list(tensors[name].shape)}, expected {list(shapes[name])}" for name in shapes
             if tensors[name].shape != shapes[name]]  # fmt: skip
    if wrong:
        raise CheckpointError(f"{folder}: tensor " + "; tensor ".join(wrong))
    return config, assemble(config, tensors)
