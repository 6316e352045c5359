"""What is static about a run: the drafter's architecture, the geometry of its cache, the step's options."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .ops.backends import Backend, why_unavailable
from .ops.checks import Layout, expect_number

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
HEAD_SWITCHES = (
    "shift_label", "markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids", "block_size",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
REFUSED_SWITCHES = {
    "causal": "the block is not causal: every slot attends to the whole block",
    "mla_use_output_gate": "output gates are not implemented",
    "mla_use_nope": "attention without rope is not implemented",
}


def _head_switch(fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A head switch from `dspark_config`, `dflash_config` or the top level. Raises ConfigError if two disagree."""
    places = [(section, fields[section]) for section in HEAD_SECTIONS if isinstance(fields.get(section), Mapping)]
    found = [(where, section[name]) for where, section in [*places, ("the top level", fields)] if section.get(name) is not None]
    for where, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(f"{name} is {found[0][1]!r} in {found[0][0]} and {value!r} in {where}: which one is meant?")
    return found[0][1] if found else default


def _parse_yarn(fields: Mapping[str, Any]) -> YarnConfig:
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(name)
    if not isinstance(rope, Mapping):
        raise ConfigError("rope_parameters (or rope_scaling) is missing: only YaRN rope is supported")
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type != "yarn":
        raise ConfigError(f"{name}.rope_type is {rope_type!r}, only 'yarn' is supported")
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise ConfigError("rope_theta is missing, both at the top level and in " + name)
    for required in ("factor", "original_max_position_embeddings"):
        if rope.get(required) is None:
            raise ConfigError(f"{name}.{required} is missing")
    for refused in ("attention_factor", "truncate"):
        if rope.get(refused) is not None and rope[refused] is not True:
            raise ConfigError(
                f"{name}.{refused} is {rope[refused]!r}: not supported, the tables follow mscale / mscale_all_dim"
            )
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    yarn = YarnConfig(
        rope_theta=float(theta),
        factor=float(rope["factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        **{key: float(rope[key]) for key in optional if rope.get(key) is not None},
    )
    if yarn.factor < 1:
        raise ConfigError(f"{name}.factor is {yarn.factor}, expected at least 1")
    return yarn


def _parse_config(fields: Mapping[str, Any]) -> DrafterConfig:
    def size(name: str, low: int = 1) -> int:
        value = fields.get(name)
        if value is None:
            raise ConfigError(f"{name} is missing (or null)")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} is {value!r}, expected an integer of at least {low}")
        return value

    for name, why in REFUSED_SWITCHES.items():
        for where in ({}, *(fields.get(section) or {} for section in HEAD_SECTIONS), fields):
            if where.get(name):
                raise ConfigError(f"{name} is true: {why}")

    layer_ids = tuple(_head_switch(fields, "target_layer_ids", ()))
    num_target_layers = fields.get("num_target_layers", len(layer_ids) or None)
    if num_target_layers is None:
        raise ConfigError("num_target_layers and target_layer_ids are missing: how many target layers are captured?")
    if layer_ids and len(layer_ids) != num_target_layers:
        raise ConfigError(f"target_layer_ids names {len(layer_ids)} layers, but num_target_layers is {num_target_layers}")
    mask_token_id = _head_switch(fields, "mask_token_id")
    if mask_token_id is None:
        raise ConfigError("mask_token_id is missing, at the top level and in dspark_config / dflash_config")
    markov_rank = int(_head_switch(fields, "markov_rank", 0))
    markov_head_type = _head_switch(fields, "markov_head_type", "vanilla")
    if markov_rank and markov_head_type != "vanilla":
        raise ConfigError(f"markov_head_type is {markov_head_type!r}, only 'vanilla' is supported")
    if markov_rank < 0:
        raise ConfigError(f"markov_rank is {markov_rank}, expected 0 (no Markov head) or more")
    block_size = _head_switch(fields, "block_size")
    shift_label = bool(_head_switch(fields, "shift_label", True))
    if block_size is not None and (not isinstance(block_size, int) or block_size < (1 if shift_label else 2)):
        raise ConfigError(f"block_size is {block_size!r}, too small for a single draft")
    rope_dim = size("qk_rope_head_dim", 2)
    if rope_dim % 2:
        raise ConfigError(f"qk_rope_head_dim is {rope_dim}, expected an even number (rope rotates pairs)")
    return DrafterConfig(
        num_hidden_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        vocab_size=size("vocab_size"),
        num_attention_heads=size("num_attention_heads"),
        q_lora_rank=size("q_lora_rank"),
        kv_lora_rank=size("kv_lora_rank"),
        qk_nope_head_dim=size("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=size("v_head_dim"),
        intermediate_size=size("intermediate_size"),
        rms_norm_eps=float(fields["rms_norm_eps"]) if fields.get("rms_norm_eps") is not None else 1e-5,
        num_target_layers=num_target_layers,
        target_hidden_size=fields.get("target_hidden_size") or size("hidden_size"),
        max_position_embeddings=size("max_position_embeddings"),
        mask_token_id=int(mask_token_id),
        rope=_parse_yarn(fields),
        target_layer_ids=layer_ids,
        shift_label=shift_label,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head_type,
        enable_confidence_head=bool(_head_switch(fields, "enable_confidence_head", False)),
        confidence_head_with_markov=bool(_head_switch(fields, "confidence_head_with_markov", False)),
        model_type=fields.get("model_type", "k3_dspark"),
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
    """Run the bookkeeping as fused kernels where their preconditions hold; never changes a bit."""
    overlap_context_projection: bool = False
    """Run the context projection beside sample/accept on pure-generation steps; never changes a bit."""
    backend: Literal["auto"] | Backend = "auto"
    """Backend of every op that has a kernel for it. `auto`: XLA on a CPU, on a GPU the faster one by `op_times.json`."""
    force: float = 0.0
    """Forced acceptance length, for measurements only (see `accept_strict`)."""
    return_draft_logits: bool = False
    return_intermediates: bool = False
    """Also return the step's floating-point results (latents, block hidden states, logits), for drafter research."""
    return_confidence: bool = False
    """Also return the confidence head's logits (needs a drafter that has one)."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.force) or self.force < 0:
            raise ValueError(f"StepOptions: force is {self.force}, expected a finite number >= 0 (0 = off)")
        if self.backend != "auto":
            why_unavailable(self.backend)  # ValueError for an unknown name

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
