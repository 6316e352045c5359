"""The drafter's arithmetic once more, from the equations: un-absorbed multi-head latent attention in float64.

Keys and values are expanded per head with `kv_b_proj` as the checkpoint stores it, the cache is a dense array, positions
are looked up nowhere: nothing of the paged, absorbed forward is reused.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import Geometry, init_state
from jdspark.checkpoint import named_tensors
from jdspark.drafter import draft_block, project_context
from jdspark.ops import block_placement, scatter_context
from jdspark.presets import SMALL_K3, TINY, random_drafter

BOUND = 5e-5
"""max|a-b| / max|b| of fp32 against fp64 through a whole drafter; measured 3e-6."""


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x, positions, config):
    """Each adjacent pair as a complex number times e^(i * position * frequency), YaRN as in HF's DeepSeek-V3."""
    yarn, dim = config.rope, config.qk_rope_head_dim
    exponent = np.arange(0, dim, 2) / dim
    plain = 1 / yarn.rope_theta**exponent

    def index_of(turns):
        return dim * np.log(yarn.original_max_position_embeddings / (turns * 2 * np.pi)) / (2 * np.log(yarn.rope_theta))

    low, high = max(np.floor(index_of(yarn.beta_fast)), 0), min(np.ceil(index_of(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequency = plain / yarn.factor * ramp + plain * (1 - ramp)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[..., None] * frequency)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def reference(tensors, config, captured, noise, context_positions, query_positions, swap_kv=False):
    """One request: `[N, T*H_t]` captured rows, `[block, H]` noise -> the block's hidden states `[block, H]`."""
    heads, nope, rope_dim, v_dim = (
        config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
    )  # fmt: skip
    eps, rank = config.rms_norm_eps, config.kv_lora_rank
    context = rms(captured @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    h = noise
    for i in range(config.num_hidden_layers):

        def weight(name, i=i):
            return tensors[f"layers.{i}.{name}.weight"]

        x = rms(h, weight("input_layernorm"), eps)
        q = rms(x @ weight("self_attn.q_a_proj").T, weight("self_attn.q_a_layernorm"), eps)
        q = (q @ weight("self_attn.q_b_proj").T).reshape(-1, heads, nope + rope_dim)
        q[..., nope:] = rotate(q[..., nope:], query_positions[:, None], config)
        sources, positions = np.concatenate([context, x]), np.concatenate([context_positions, query_positions])
        compressed = sources @ weight("self_attn.kv_a_proj_with_mqa").T
        k_rope = rotate(compressed[:, rank:], positions, config)
        expanded = rms(compressed[:, :rank], weight("self_attn.kv_a_layernorm"), eps) @ weight("self_attn.kv_b_proj").T
        expanded = expanded.reshape(-1, heads, nope + v_dim)
        k_nope, v = expanded[..., :nope], expanded[..., nope:]
        if swap_kv:
            v, k_nope = expanded[..., :v_dim], expanded[..., v_dim:]
        k = np.concatenate([k_nope, np.broadcast_to(k_rope[:, None], (*k_nope.shape[:2], rope_dim))], -1)
        mscale = 0.1 * config.rope.mscale_all_dim * np.log(config.rope.factor) + 1
        scores = np.einsum("qhd,khd->hqk", q, k) * mscale**2 / np.sqrt(nope + rope_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khv->qhv", weights, v).reshape(len(h), heads * v_dim)
        h = h + attended @ weight("self_attn.o_proj").T
        x = rms(h, weight("post_attention_layernorm"), eps)
        gate = x @ weight("mlp.gate_proj").T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return rms(h, tensors["norm.weight"], eps)


def block_forward(config, layout, context_lens, seed=0):
    """The paged, absorbed forward of several requests in one batch, and what the reference needs to repeat it."""
    rng = np.random.default_rng(seed)
    params = random_drafter(config, seed, dtype="float32")
    geometry = Geometry(
        max_batch=len(context_lens), max_draft_len=7, page_size=4, num_pages=80, max_blocks_per_seq=14, max_ctx=48,
        layout=layout,
    )  # fmt: skip
    state = init_state(config, geometry, dtype=jnp.float32)
    pool = jnp.full(state.pool.shape, jnp.nan)  # whatever is not stored below must not matter
    table = rng.permutation(80)[: 14 * len(context_lens)].reshape(-1, 14).astype(np.int32)
    captured = [rng.standard_normal((n, config.captured_size), np.float32) for n in context_lens]
    rows = np.repeat(np.arange(len(context_lens)), context_lens).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in context_lens]).astype(np.int32)
    latents = project_context(
        params, config, jnp.asarray(np.concatenate(captured)), jnp.asarray(positions), state.rope_cos, state.rope_sin
    )
    pool = scatter_context(pool, latents, rows, positions, table, layout=layout)
    advertised = np.array(context_lens, np.int32)
    placement = block_placement(advertised, table, block_size=7, page_size=4)
    noise = rng.standard_normal((len(context_lens), 7, config.hidden_size), np.float32)
    query_positions = advertised[:, None] + np.arange(7, dtype=np.int32)
    hidden, _ = draft_block(
        params, config, geometry, jnp.asarray(noise), jnp.asarray(query_positions), pool, placement,
        jnp.asarray(advertised), state.rope_cos, state.rope_sin,
    )  # fmt: skip
    tensors = {name: np.asarray(value, np.float64) for name, value in named_tensors(config, params).items()}
    return np.asarray(hidden), tensors, captured, noise, query_positions


def difference(ours, wanted):
    return np.abs(ours - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("config", [TINY, SMALL_K3], ids=["tiny", "small_k3"])
def test_absorbed_paged_forward_equals_the_unabsorbed_one(config, layout):
    context_lens = [0, 1, 13, 48]
    hidden, tensors, captured, noise, query_positions = block_forward(config, layout, context_lens)
    for b, length in enumerate(context_lens):
        operands = (
            tensors, config, captured[b].astype(np.float64), noise[b].astype(np.float64), np.arange(length),
            query_positions[b],
        )  # fmt: skip
        assert difference(hidden[b], reference(*operands)) < BOUND, f"context of {length}"


def test_swapped_halves_of_kv_b_are_noticed():
    """Negative control; nope and v widths are equal here, so nothing but the numbers can tell."""
    assert TINY.qk_nope_head_dim == TINY.v_head_dim
    hidden, tensors, captured, noise, query_positions = block_forward(TINY, "layer_major", [13])
    operands = (
        tensors, TINY, captured[0].astype(np.float64), noise[0].astype(np.float64), np.arange(13), query_positions[0],
    )  # fmt: skip
    assert difference(hidden[0], reference(*operands)) < BOUND
    assert difference(hidden[0], reference(*operands, swap_kv=True)) > 0.05


def test_context_positions_and_depth_matter():
    """Negative controls: a shifted position, a dropped context token and a missing layer are noticed too."""
    hidden, tensors, captured, noise, query_positions = block_forward(TINY, "layer_major", [13])
    x, block, q = captured[0].astype(np.float64), noise[0].astype(np.float64), query_positions[0]
    assert difference(hidden[0], reference(tensors, TINY, x, block, np.arange(13) + 1, q)) > 50 * BOUND
    assert difference(hidden[0], reference(tensors, TINY, x[1:], block, np.arange(1, 13), q)) > 50 * BOUND
    shallower = dataclasses.replace(TINY, num_hidden_layers=1)
    assert difference(hidden[0], reference(tensors, shallower, x, block, np.arange(13), q)) > 50 * BOUND
