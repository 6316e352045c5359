"""Reading and writing drafter checkpoints: a folder with `config.json` and `*.safetensors`, sharded or not."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .config import ConfigError, DrafterConfig
from .params import DrafterParams, LayerParams

logger = logging.getLogger("jdspark")

INDEX_FILE = "model.safetensors.index.json"

SPELLINGS = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "confidence_proj.weight",
    "confidence_head.proj.bias": "confidence_proj.bias",
}
"""The other published name of a tensor -> the name used here."""


class CheckpointError(ValueError):
    """A checkpoint folder cannot be loaded as it is; the message names the tensor, field or file."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, before it is read."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: `BF16`, `F32`, ..."""


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """What a checkpoint folder holds, held against what its config asks for. Nothing is read but headers."""

    config: DrafterConfig
    tensors: dict[str, StoredTensor]
    """Tensors the drafter uses, by their name here."""
    skipped: tuple[str, ...]
    """Names known to be unused at inference."""
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    wrong_shapes: tuple[str, ...]
    """One sentence per tensor whose shape is not what the config asks for."""

    def problems(self) -> list[str]:
        """Everything that keeps this checkpoint from loading, one sentence each."""
        found = [f"tensor {name} is missing" for name in self.missing]
        found += self.wrong_shapes
        if self.unknown:
            found.append(f"unknown tensors (a third spelling?): {', '.join(self.unknown)}")
        return found


def layer_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, by their name below `layers.N.`."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (config.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (config.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }


def required_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor the config asks for, by name."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, config.captured_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    if config.markov_rank:
        shapes |= {f"markov_w{i}.weight": (config.vocab_size, config.markov_rank) for i in (1, 2)}
    if config.enable_confidence_head:
        width = hidden + (config.markov_rank if config.confidence_head_with_markov else 0)
        shapes |= {"confidence_proj.weight": (1, width), "confidence_proj.bias": (1,)}
    return shapes


def _is_unused(name: str) -> bool:
    return name.startswith("lm_head.") or name.endswith("rotary_emb.inv_freq")


def _canonical(stored_name: str) -> str:
    name = stored_name.removeprefix("model.")
    return SPELLINGS.get(name, name)


def read_json(path: Path) -> dict:
    """The object in a checkpoint's JSON file; raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: a checkpoint is a folder with config.json and *.safetensors") from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{folder} holds no *.safetensors file (pickled weights are never read: convert them)")
        return found
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}, expected a file of the same folder")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard}, which does not exist")
    return [folder / shard for shard in shards]


def _stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    for file in _safetensors_files(folder):
        try:
            with safe_open(file, framework="numpy") as shard:
                for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                    header = shard.get_slice(name)
                    yield StoredTensor(file, name, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointContents:
    """Hold a checkpoint folder's tensors against its config without reading any weights.

    Raises:
        CheckpointError: a file is missing or unreadable, a tensor is there twice.
        ConfigError: the config has a missing, contradictory or unsupported field, or disagrees with the tensors about
            the Markov head.
    """
    folder = Path(path)
    config = DrafterConfig.from_json(read_json(folder / "config.json"))
    required = required_shapes(config)
    tensors: dict[str, StoredTensor] = {}
    skipped, unknown, wrong = [], [], []
    for stored in _stored_tensors(folder):
        name = _canonical(stored.stored_name)
        if _is_unused(name) or (name.startswith("confidence_proj.") and not config.enable_confidence_head):
            skipped.append(stored.stored_name)
            continue
        if name.startswith("markov_w") and not config.markov_rank:
            raise ConfigError(f"markov_rank is 0 or missing, but the checkpoint has Markov weights ({stored.stored_name})")
        if name in tensors:
            raise CheckpointError(
                f"tensor {name} is there twice: {tensors[name].stored_name} in {tensors[name].file.name},"
                f" {stored.stored_name} in {stored.file.name}"
            )
        allowed = [required[name]] if name in required else []
        if name == "mask_token_embedding":
            allowed = [(config.hidden_size,), (1, config.hidden_size)]
        if not allowed:
            unknown.append(stored.stored_name)
            continue
        if stored.shape not in allowed:
            wanted = " or ".join(str(list(shape)) for shape in allowed)
            wrong.append(f"tensor {stored.stored_name} has shape {list(stored.shape)}, expected {wanted}")
        if stored.dtype not in ("BF16", "F16", "F32"):
            wrong.append(f"tensor {stored.stored_name} has dtype {stored.dtype}, expected BF16, F16 or F32")
        tensors[name] = stored
    if config.mask_token_id >= config.vocab_size and "mask_token_embedding" not in tensors:
        raise ConfigError(
            f"mask_token_id is {config.mask_token_id}, outside the vocabulary of {config.vocab_size}, and the checkpoint ships"
            " no mask_token_embedding"
        )
    missing = tuple(name for name in required if name not in tensors)
    absent_markov = [name for name in missing if name.startswith("markov_w")]
    if len(absent_markov) == 2:
        raise ConfigError(f"markov_rank is {config.markov_rank}, but the checkpoint has no Markov weights ({absent_markov[0]})")
    return CheckpointContents(config, tensors, tuple(skipped), tuple(unknown), missing, tuple(wrong))


def load_drafter(path: str | os.PathLike[str], *, dtype: str | None = None) -> tuple[DrafterConfig, DrafterParams]:
    """Load a drafter from a folder with `config.json` and `*.safetensors`.

    The output head is the target's: set it with `params.with_lm_head(...)`. `lm_head.*` in the checkpoint is skipped.

    Args:
        path: the folder.
        dtype: cast every weight to this (`"float32"`, `"bfloat16"`); None keeps the checkpoint's.

    Raises:
        CheckpointError: a file, tensor, shape or dtype is missing, wrong or unknown; all of them are listed.
        ConfigError: see `DrafterConfig.from_json`.
    """
    contents = inspect_checkpoint(path)
    problems = contents.problems()
    if problems:
        raise CheckpointError(f"{path} does not load: " + "; ".join(problems))
    if contents.skipped:
        logger.info("%s: skipped, unused at inference: %s", path, ", ".join(contents.skipped))
    if dtype is None:
        _expect_one_dtype(contents)
    weights = {}
    for name, stored in contents.tensors.items():
        with safe_open(stored.file, framework="numpy") as shard:
            weights[name] = jnp.asarray(shard.get_tensor(stored.stored_name), dtype=dtype)
    return contents.config, assemble_params(contents.config, weights)


def _expect_one_dtype(contents: CheckpointContents) -> None:
    """Matrices meet in GEMMs, so they share one dtype; norms and the mask row are converted where they are used."""
    matrices = {name: stored for name, stored in contents.tensors.items() if len(stored.shape) == 2}
    matrices.pop("mask_token_embedding", None)
    expected = matrices["embed_tokens.weight"].dtype
    odd = [f"{stored.stored_name} is {stored.dtype}" for stored in matrices.values() if stored.dtype != expected]
    if odd:
        raise CheckpointError(
            f"embed_tokens.weight is {expected}, but {', '.join(odd)}: weights that meet in a GEMM need one dtype;"
            " pass dtype= to cast them"
        )


def assemble_params(config: DrafterConfig, weights: Mapping[str, jnp.ndarray]) -> DrafterParams:
    """Build the pytree from tensors by their published names: stacks `kv_a_proj`, splits `kv_b_proj` into K and V."""
    heads, nope, v_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim

    def layer(index: int) -> LayerParams:
        def get(name: str) -> jnp.ndarray:
            return weights[f"layers.{index}.{name}.weight"]

        kv_b = get("self_attn.kv_b_proj").reshape(heads, nope + v_dim, config.kv_lora_rank)
        return LayerParams(
            input_layernorm=get("input_layernorm"),
            q_a_proj=get("self_attn.q_a_proj"),
            q_a_layernorm=get("self_attn.q_a_layernorm"),
            q_b_proj=get("self_attn.q_b_proj"),
            k_b=kv_b[:, :nope],
            v_b=kv_b[:, nope:],
            o_proj=get("self_attn.o_proj"),
            post_attention_layernorm=get("post_attention_layernorm"),
            gate_proj=get("mlp.gate_proj"),
            up_proj=get("mlp.up_proj"),
            down_proj=get("mlp.down_proj"),
        )

    indices = range(config.num_hidden_layers)
    mask_row = weights.get("mask_token_embedding")
    return DrafterParams(
        embed_tokens=weights["embed_tokens.weight"],
        fc=weights["fc.weight"],
        hidden_norm=weights["hidden_norm.weight"],
        kv_a_proj=jnp.stack([weights[f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight"] for i in indices]),
        kv_a_layernorm=jnp.stack([weights[f"layers.{i}.self_attn.kv_a_layernorm.weight"] for i in indices]),
        layers=tuple(layer(i) for i in indices),
        norm=weights["norm.weight"],
        markov_w1=weights.get("markov_w1.weight"),
        markov_w2=weights.get("markov_w2.weight"),
        confidence_proj=weights.get("confidence_proj.weight"),
        confidence_bias=weights.get("confidence_proj.bias"),
        mask_token_embedding=None if mask_row is None else mask_row.reshape(config.hidden_size),
    )


def named_tensors(config: DrafterConfig, params: DrafterParams) -> dict[str, jnp.ndarray]:
    """The inverse of `assemble_params`: tensors by their published names, `kv_b_proj` joined again."""
    named = {
        "embed_tokens.weight": params.embed_tokens,
        "fc.weight": params.fc,
        "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
        "markov_w1.weight": params.markov_w1,
        "markov_w2.weight": params.markov_w2,
        "confidence_proj.weight": params.confidence_proj,
        "confidence_proj.bias": params.confidence_bias,
        "mask_token_embedding": params.mask_token_embedding,
    }
    for index, layer in enumerate(params.layers):
        kv_b = jnp.concatenate([layer.k_b, layer.v_b], axis=1).reshape(-1, config.kv_lora_rank)
        attention = {
            "q_a_proj": layer.q_a_proj,
            "q_a_layernorm": layer.q_a_layernorm,
            "q_b_proj": layer.q_b_proj,
            "kv_a_proj_with_mqa": params.kv_a_proj[index],
            "kv_a_layernorm": params.kv_a_layernorm[index],
            "kv_b_proj": kv_b,
            "o_proj": layer.o_proj,
        }
        named |= {f"layers.{index}.self_attn.{name}.weight": weight for name, weight in attention.items()}
        mlp = {"gate_proj": layer.gate_proj, "up_proj": layer.up_proj, "down_proj": layer.down_proj}
        named |= {f"layers.{index}.mlp.{name}.weight": weight for name, weight in mlp.items()}
        named[f"layers.{index}.input_layernorm.weight"] = layer.input_layernorm
        named[f"layers.{index}.post_attention_layernorm.weight"] = layer.post_attention_layernorm
    return {name: weight for name, weight in named.items() if weight is not None}


def save_drafter(path: str | os.PathLike[str], config: DrafterConfig, params: DrafterParams) -> None:
    """Write `config.json` and `model.safetensors` into the folder `path` (made if needed). `lm_head` is not written.

    Raises:
        CheckpointError: the weights do not match the config, or the folder holds other safetensors files that a later
            load would mix in.
    """
    folder = Path(path)
    named = named_tensors(config, params)
    required = required_shapes(config)
    wrong = [f"tensor {name} is missing" for name in required if name not in named]
    wrong += [
        f"tensor {name} has shape {list(named[name].shape)}, expected {list(shape)}"
        for name, shape in required.items()
        if name in named and tuple(named[name].shape) != shape
    ]
    wrong += [
        f"tensor {name} is not in the config" for name in named if name not in required and name != "mask_token_embedding"
    ]
    if wrong:
        raise CheckpointError(f"{folder} was not written: " + "; ".join(wrong))
    folder.mkdir(parents=True, exist_ok=True)
    others = [file.name for file in folder.iterdir() if file.suffix == ".safetensors" or file.name == INDEX_FILE]
    if [name for name in others if name != "model.safetensors"]:
        raise CheckpointError(f"{folder} holds {', '.join(sorted(others))}: write into an empty folder")
    save_file({name: np.asarray(weight) for name, weight in named.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
