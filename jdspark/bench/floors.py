"""The fewest bytes that a decode step and each of its parts have to move, and the time that a copy of them would take."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DrafterConfig
from .clock import median_seconds, seconds_per_call

BYTES_PER_INT = 4


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What one part of a step moves through device memory at least."""

    weights: int = 0
    """Every weight that it multiplies with, once; the Markov chain's `w2` once per slot."""
    latents: int = 0
    """Context latents that it reads, once."""
    operands: int = 0
    """Logits, page tables, hidden states and pages: what else it reads and writes, but for small tensors that the part before
    has just left in the cache."""
    again: int = 0
    """Weights and latents that another part of the step has already read; a floor of the step does not count them twice."""

    @property
    def total(self) -> int:
        """What the floor of this part counts."""
        return self.weights + self.latents + self.operands + self.again


def part_bytes(
    config: DrafterConfig, *, B: int, K: int, context: int, columns: int, vocab: int, itemsize: int
) -> dict[str, Bytes]:
    """Bytes of each part of a step, in the order in which the step runs them, then of several parts in one.

    Args:
        context: advertised tokens of every request.
        columns: of the page tables.
        vocab: rows of `lm_head` and `w2`, and columns of the target's logits.
        itemsize: bytes per weight, latent and captured number.
    """
    L, D, H, heads = config.num_hidden_layers, config.latent_dim, config.hidden_size, config.num_attention_heads
    rank, q_rank = config.kv_lora_rank, config.q_lora_rank
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    block, verified = B * config.block_width(K), B * (K + 1)
    kv_a = L * (D * H + rank)
    query = L * (H + q_rank * H + q_rank + heads * head_dim * q_rank + heads * config.qk_nope_head_dim * rank)
    output = L * (heads * config.v_head_dim * rank + H * heads * config.v_head_dim)
    of = {
        "accept": Bytes(operands=verified * vocab * 4),
        # one of each pair of offsets is read, one page number written; the noise block
        "prepare": Bytes(operands=B * columns * 2 * BYTES_PER_INT + itemsize * (B + 1 + block) * H),
        "context projection": Bytes(
            weights=itemsize * (H * config.captured_size + H), operands=itemsize * verified * config.captured_size
        ),
        "context latents": Bytes(weights=itemsize * kv_a),
        "store": Bytes(operands=itemsize * 2 * verified * L * D),
        "query": Bytes(weights=itemsize * query),
        "block latents": Bytes(again=itemsize * kv_a),
        "attention": Bytes(latents=itemsize * B * context * L * D),
        "attention output": Bytes(weights=itemsize * output),
        "mlp": Bytes(weights=itemsize * L * (H + 3 * config.intermediate_size * H)),
        "lm_head": Bytes(weights=itemsize * (H + vocab * H), operands=B * K * vocab * (itemsize + 4)),
        "markov chain": Bytes(weights=itemsize * K * vocab * config.markov_rank, operands=2 * B * K * vocab * 4),
        "block write": Bytes(operands=itemsize * 2 * block * L * D),
        "next tokens": Bytes(operands=BYTES_PER_INT * (2 * B * (K + 1) + B * K)),
    }
    # parts above that a larger kernel does in one
    projection, in_layers = of["context projection"], ("query", "block latents", "attention", "attention output", "mlp")
    of["whole context"] = Bytes(operands=projection.operands, again=projection.weights + of["context latents"].weights)
    of["all layers"] = Bytes(again=sum(of[part].total for part in in_layers) + itemsize * H)  # and the last norm
    return of


def step_bytes(parts: dict[str, Bytes]) -> int:
    """What the floor of a whole step counts: every weight and latent byte once, `w2` once per slot."""
    return sum(part.weights + part.latents for part in parts.values())


def floor_us(num_bytes: int, bandwidth: float) -> float:
    """Microseconds that moving this many bytes takes at a copy's bandwidth in bytes per second, read and written counted."""
    return num_bytes / bandwidth * 1e6


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second, read plus written, of a copy of this many bytes from device memory to device memory.

    By the host's clock, what thirty copies in a row take longer than ten: the host's part of a run is in both. Medians of five;
    a copy must take longer than its dispatch.
    """
    copy = jax.jit(jnp.copy)
    source = jax.block_until_ready(jnp.asarray(np.random.default_rng(0).standard_normal(1 << 16, np.float32)))
    source = jax.block_until_ready(jnp.tile(source, max(1, num_bytes // source.nbytes)))

    def copies(times: int) -> None:
        for _ in range(times):
            last = copy(source)
        last.block_until_ready()

    copies(1)
    few, many = (median_seconds(functools.partial(copies, times), 5) for times in (10, 30))
    return 2 * source.nbytes / seconds_per_call(10, few, 30, many)
