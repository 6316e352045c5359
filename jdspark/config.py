"""What is static about a run: the drafter's architecture, the geometry of its cache, the step's options."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .ops.backends import Backend, check_backend
from .ops.checks import INT32_MAX, Layout, expect_number

logger = logging.getLogger("jdspark")


class ConfigError(ValueError):
    """A field of a drafter's `config.json` is missing, contradictory or not supported; the message names it."""


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """`rope_parameters` of a YaRN drafter."""

    rope_theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """The architecture of an MLA DFlash / DSpark drafter, named as in its `config.json`."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    num_target_layers: int
    """Target layers whose hidden states are captured."""
    target_hidden_size: int
    max_position_embeddings: int
    mask_token_id: int
    rope: YarnConfig
    target_layer_ids: tuple[int, ...] = ()
    shift_label: bool = True
    """True (DSpark): drafts come from block slots 0..K-1; False (DFlash): from slots 1..K."""
    block_size: int | None = None
    """The widest block the drafter was trained for; None leaves it to the run's `max_draft_len`."""
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    model_type: str = "k3_dspark"

    @property
    def latent_dim(self) -> int:
        """`D`, numbers stored per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def captured_size(self) -> int:
        """Width of one captured row: the target layers' hidden states side by side."""
        return self.num_target_layers * self.target_hidden_size

    @property
    def first_draft_slot(self) -> int:
        """Block slot of the first draft."""
        return 0 if self.shift_label else 1

    def block_width(self, max_draft_len: int) -> int:
        """Positions the drafter computes per request. Raises ConfigError if it was trained for fewer."""
        width = max_draft_len + self.first_draft_slot
        if self.block_size is not None and width > self.block_size:
            allowed = self.block_size - self.first_draft_slot
            raise ConfigError(
                f"max_draft_len is {max_draft_len}, but the drafter's block_size {self.block_size} allows {allowed} drafts"
                f" (shift_label is {str(self.shift_label).lower()})"
            )
        return width

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DrafterConfig:
        """Read a parsed `config.json`. Raises ConfigError naming the field that is missing or not supported."""
        return _parse_config(fields)

    def to_json(self) -> dict[str, Any]:
        """The `config.json` of this drafter, everything at the top level as the published one has it."""
        fields = dataclasses.asdict(self)
        rope = fields.pop("rope")
        fields["rope_theta"] = rope["rope_theta"]
        fields["rope_parameters"] = {"rope_type": "yarn", **rope}
        fields["target_layer_ids"] = list(self.target_layer_ids)
        if fields["block_size"] is None:
            del fields["block_size"]
        fields["architectures"] = ["K3DSparkModel"]
        fields["num_key_value_heads"] = self.num_attention_heads
        fields["mla_use_nope"] = fields["mla_use_output_gate"] = fields["tie_word_embeddings"] = False
        return fields


HEAD_SECTIONS = ("dspark_config", "dflash_config")
REFUSED_SWITCHES = {
    "causal": "the block is not causal: every slot attends to the whole block",
    "mla_use_output_gate": "output gates are not implemented",
    "mla_use_nope": "attention without rope is not implemented",
}


class _Fields:
    """Typed reading of a parsed `config.json`: every error names the field."""

    def __init__(self, fields: Mapping[str, Any]):
        if not isinstance(fields, Mapping):
            raise ConfigError(f"the config is a {type(fields).__name__}, expected an object")
        self.places: list[tuple[str, Mapping[str, Any]]] = []
        for section in HEAD_SECTIONS:
            inner = fields.get(section)
            if inner is not None and not isinstance(inner, Mapping):
                raise ConfigError(f"{section} is {inner!r}, expected an object")
            if inner is not None:
                self.places.append((section, inner))
        self.places.append(("the top level", fields))
        self.top = fields

    def head(self, name: str) -> Any:
        """A head switch from `dspark_config`, `dflash_config` or the top level; None if it is missing or null."""
        found = [(where, place[name]) for where, place in self.places if place.get(name) is not None]
        for where, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(f"{name} is {found[0][1]!r} in {found[0][0]} and {value!r} in {where}: which one is meant?")
        return found[0][1] if found else None

    def top_level(self, name: str) -> Any:
        """A top-level field; missing and null are the same."""
        return self.top.get(name)


def _integer(name: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {_shown(value)}, expected an integer in [{low}, {high}]")
    return value


def _number(name: str, value: Any, *, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not value > above:
        raise ConfigError(f"{name} is {_shown(value)}, expected a finite number above {above:g}")
    return float(value)


def _switch(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {_shown(value)}, expected true or false")
    return value


def _shown(value: Any) -> str:
    return "missing (or null)" if value is None else repr(value)[:80]


def _parse_yarn(fields: _Fields) -> YarnConfig:
    name = "rope_parameters" if fields.top_level("rope_parameters") is not None else "rope_scaling"
    rope = fields.top_level(name)
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{name} is {_shown(rope)}: rope_parameters (or rope_scaling) must be there, only YaRN is supported")
    kinds = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    if kinds != {"yarn"}:
        raise ConfigError(f"{name}.rope_type is {', '.join(map(repr, sorted(kinds))) or 'missing'}, only 'yarn' is supported")
    for refused in ("attention_factor", "truncate"):
        if rope.get(refused) not in (None, True):
            raise ConfigError(f"{name}.{refused} is {rope[refused]!r}: not supported, the tables follow mscale(_all_dim)")
    theta, outer_theta = rope.get("rope_theta"), fields.top_level("rope_theta")
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise ConfigError(f"rope_theta is {theta!r} in {name} and {outer_theta!r} at the top level: which one is meant?")
    optional = {"beta_fast": 0.0, "beta_slow": 0.0, "mscale": -1.0, "mscale_all_dim": -1.0}
    factor = _number(f"{name}.factor", rope.get("factor"), above=0)
    if factor < 1:
        raise ConfigError(f"{name}.factor is {factor}, expected at least 1")
    original = f"{name}.original_max_position_embeddings"
    return YarnConfig(
        rope_theta=_number("rope_theta", outer_theta if theta is None else theta, above=1),
        factor=factor,
        original_max_position_embeddings=_integer(original, rope.get("original_max_position_embeddings"), 1),
        **{key: _number(f"{name}.{key}", rope[key], above=low) for key, low in optional.items() if rope.get(key) is not None},
    )


def _parse_config(config_json: Mapping[str, Any]) -> DrafterConfig:
    fields = _Fields(config_json)

    def size(name: str, low: int = 1, high: int = INT32_MAX) -> int:
        return _integer(name, fields.top_level(name), low, high)

    for name, why in REFUSED_SWITCHES.items():
        if any(_switch(name, place.get(name), False) for _, place in fields.places):
            raise ConfigError(f"{name} is true: {why}")
    if fields.top_level("kv_lora_rank") is None:
        model = _shown(fields.top_level("model_type"))
        raise ConfigError(f"kv_lora_rank is missing (model_type {model}): only drafters with multi-head latent attention load")
    hidden_act = fields.top_level("hidden_act")
    if hidden_act not in (None, "silu"):
        raise ConfigError(f"hidden_act is {hidden_act!r}, only 'silu' is supported")

    layer_ids = fields.head("target_layer_ids")
    if layer_ids is not None and not isinstance(layer_ids, list | tuple):
        raise ConfigError(f"target_layer_ids is {_shown(layer_ids)}, expected a list of layer numbers")
    layer_ids = tuple(_integer("target_layer_ids", layer, 0) for layer in layer_ids or ())
    num_target_layers = fields.top_level("num_target_layers")
    if num_target_layers is None and layer_ids:
        num_target_layers = len(layer_ids)
    num_target_layers = _integer("num_target_layers", num_target_layers, 1)
    if layer_ids and len(layer_ids) != num_target_layers:
        raise ConfigError(f"target_layer_ids names {len(layer_ids)} layers, but num_target_layers is {num_target_layers}")

    vocab_size = size("vocab_size")
    shift_label = _switch("shift_label", fields.head("shift_label"), True)
    block_size = fields.head("block_size")
    if block_size is not None:
        block_size = _integer("block_size", block_size, 1 if shift_label else 2)
    markov_rank = fields.head("markov_rank")
    markov_rank = 0 if markov_rank is None else _integer("markov_rank", markov_rank, 0)
    markov_head_type = fields.head("markov_head_type") or "vanilla"
    if markov_head_type != "vanilla":
        raise ConfigError(f"markov_head_type is {_shown(markov_head_type)}, only 'vanilla' is supported")
    confidence = _switch("enable_confidence_head", fields.head("enable_confidence_head"), False)
    confidence_with_markov = _switch("confidence_head_with_markov", fields.head("confidence_head_with_markov"), False)
    if confidence and confidence_with_markov and not markov_rank:
        raise ConfigError("confidence_head_with_markov is true, but markov_rank is 0: there is no Markov embedding")
    rope_dim = size("qk_rope_head_dim", 2)
    if rope_dim % 2:
        raise ConfigError(f"qk_rope_head_dim is {rope_dim}, expected an even number (rope rotates pairs)")
    eps, target_hidden = fields.top_level("rms_norm_eps"), fields.top_level("target_hidden_size")
    return DrafterConfig(
        num_hidden_layers=size("num_hidden_layers", high=1000),
        hidden_size=size("hidden_size"),
        vocab_size=vocab_size,
        num_attention_heads=size("num_attention_heads"),
        q_lora_rank=size("q_lora_rank"),
        kv_lora_rank=size("kv_lora_rank"),
        qk_nope_head_dim=size("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=size("v_head_dim"),
        intermediate_size=size("intermediate_size"),
        rms_norm_eps=1e-5 if eps is None else _number("rms_norm_eps", eps, above=0),
        num_target_layers=num_target_layers,
        target_hidden_size=size("hidden_size") if target_hidden is None else _integer("target_hidden_size", target_hidden, 1),
        max_position_embeddings=size("max_position_embeddings"),
        mask_token_id=_integer("mask_token_id", fields.head("mask_token_id"), 0),
        rope=_parse_yarn(fields),
        target_layer_ids=layer_ids,
        shift_label=shift_label,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence_with_markov,
        model_type=str(fields.top_level("model_type") or "k3_dspark"),
    )


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a run: slots, draft width and the paged latent pool. Raises ValueError for sizes that cannot work."""

    max_batch: int
    """Request slots; one dummy slot is added behind them."""
    max_draft_len: int
    """Most drafts per request and step."""
    page_size: int
    """`P`, tokens per page."""
    num_pages: int
    """Pages in the pool."""
    max_blocks_per_seq: int
    """Columns of the block tables."""
    max_ctx: int
    """Most context tokens per request."""
    layout: Layout = "layer_major"
    offset_divisor: int = 1
    """Page-manager offsets per page: `kv_factor`, or `pool_layers * kv_factor` for the page-major slice."""
    pool_idx: int = 0
    """Which pool of `encoded_offsets` holds the drafter's pages."""

    def __post_init__(self) -> None:
        for field in (
            "max_batch",
            "max_draft_len",
            "page_size",
            "num_pages",
            "max_blocks_per_seq",
            "max_ctx",
            "offset_divisor",
        ):
            expect_number("Geometry", field, getattr(self, field), 1)
        expect_number("Geometry", "pool_idx", self.pool_idx, 0)
        if self.layout not in get_args(Layout):
            raise ValueError(f"Geometry: layout is {self.layout!r}, expected one of {', '.join(get_args(Layout))}")

    @property
    def dummy_slot(self) -> int:
        """The slot of padding rows: the last one, always empty."""
        return self.max_batch

    def rope_length(self, config: DrafterConfig) -> int:
        """Rows of the rope tables: every position a block or a verified token can have."""
        block_size = config.block_width(self.max_draft_len)
        return self.max_ctx + max(block_size, self.max_draft_len + 1)

    def check(self, config: DrafterConfig) -> None:
        """Raise ValueError if this geometry and the drafter do not fit together."""
        config.block_width(self.max_draft_len)
        if self.max_ctx > config.max_position_embeddings:
            raise ValueError(
                f"Geometry: max_ctx is {self.max_ctx}, beyond the rope table of the drafter"
                f" (max_position_embeddings {config.max_position_embeddings}); lower max_ctx"
            )


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a decode step is computed and what it returns; static, so each combination compiles once."""

    fused_prologue: bool = False
    """Run the bookkeeping as fused kernels where their preconditions hold; all of them are exact, so no bit changes."""
    overlap_context_projection: bool = False
    """Run the context projection beside sample/accept on pure-generation steps; never changes a bit."""
    backend: Literal["auto"] | Backend = "auto"
    """Backend of every op that has a kernel for it. `auto`: XLA; with `fused_prologue`, on a GPU, for each exact op the faster
    of XLA and Pallas by `op_times.json`. Name another backend in `store_prefill_context` as well: a pool's latents then have
    one norm and rope. Their products as well on XLA and Triton; Pallas has them for a step's few rows only."""
    float_backend: Backend | None = None
    """Backend of the floating-point ops (`FloatBackends`, and the Markov chain with its product) if not `backend`'s choice.
    `"triton"` runs every one of them from the source that the torch twin launches: the two steps then agree in every bit."""
    force: float = 0.0
    """Accepted drafts per step on average, forced, for measurements only (see `accept_strict`)."""
    sampling: bool = False
    """Rejection acceptance and drawn drafts, instead of greedy ones: the step then needs `StepInputs.sampling` and
    `draft_probabilities`."""
    return_draft_logits: bool = False
    return_intermediates: bool = False
    """Also return the step's floating-point results (latents, block hidden states, logits), for drafter research."""
    return_confidence: bool = False
    """Also return the confidence head's logits (needs a drafter that has one)."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.force) or self.force < 0:
            raise ValueError(f"StepOptions: force is {self.force}, expected a finite number >= 0 (0 = off)")
        if self.sampling and self.force:
            raise ValueError(f"StepOptions: force is {self.force} and sampling is on: an acceptance is drawn or forced")
        check_backend(self.backend, "StepOptions: backend", "auto")
        if self.float_backend is not None:
            check_backend(self.float_backend, "StepOptions: float_backend")

    @property
    def prefill_backend(self) -> str:
        """Backend of the exact ops of `store_prefill_context` beside such a step."""
        return "xla" if self.backend == "auto" else self.backend

    @classmethod
    def from_env(cls, **options: Any) -> StepOptions:
        """Options with the two switches read from the environment now.

        `TLLM_DFLASH_FUSED_PROLOGUE` and `TLLM_DFLASH_OVERLAP_CONTEXT_PROJECTION`: `1` is on, `0` or unset off. A step
        that is already compiled keeps what it was traced with.
        """
        return cls(
            fused_prologue=_env_switch("TLLM_DFLASH_FUSED_PROLOGUE"),
            overlap_context_projection=_env_switch("TLLM_DFLASH_OVERLAP_CONTEXT_PROJECTION"),
            **options,
        )


def _env_switch(name: str) -> bool:
    value = os.environ.get(name, "0").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}, expected 0 or 1")
    return value == "1"
