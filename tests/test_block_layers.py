"""The drafter's layers in Pallas: products that stream their weights, what the attention takes, and all of it together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import ops, presets
from jdspark.drafter import LayersShape, ProductShape, block_layers, compress_context, draft_logits
from jdspark.rope import yarn_tables
from pallas_kernels import block_layers as kernels
from pallas_kernels import streamed_product as streaming
from pallas_kernels.attention_operands import attention_operands, most_nope
from pallas_kernels.compress_context import compress_context as compress_context_in_pallas
from pallas_kernels.draft_logits import draft_logits as draft_logits_in_pallas
from pallas_kernels.draft_logits import unsupported as unsupported_head
from pallas_kernels.streamed_product import Normed, Stacked, normed_rows, padded, rows_and_cluster, streamed_product
from torch_bridge import compare

on_a_cpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter; the GPU runs K3 shapes below")

ROUNDING = 2.0**-7
"""Of the largest value: products are rounded to bf16 once (2^-9), and so are a norm's rows ahead of the product."""

SMALL = dataclasses.replace(
    presets.TINY, hidden_size=128, q_lora_rank=64, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=32,
    intermediate_size=64,
)  # fmt: skip


def draw(rng: np.random.Generator, *shape: int) -> tuple[jax.Array, np.ndarray]:
    """A bf16 array and its values as fp64."""
    x = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    return x, np.asarray(x, np.float64)


def assert_close(found: jax.Array | None, wanted: np.ndarray, bound: float = ROUNDING) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    np.testing.assert_array_less(np.abs(np.asarray(found, np.float64) - wanted), bound * np.abs(wanted).max())


def rms(h: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * h / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.fixture
def two_stages(monkeypatch):
    """A ring that every stage of which is used again."""
    monkeypatch.setattr(streaming, "MAX_STAGES", 2)


EPS = 0.5
"""Large, so that it cannot be left out."""


@on_a_cpu
def test_a_normed_product_of_two_weights(two_stages):
    """Whole tiles of either weight, one of them inside a stack; the norm of the first result is prepared for what follows."""
    rng = np.random.default_rng(0)
    (h, h64), (norm, norm64), (w, w64), (stack, stack64) = (
        draw(rng, 8, 1280),
        draw(rng, 1280),
        draw(rng, 64, 1280),
        draw(rng, 3, 32, 1280),
    )
    following, following64 = draw(rng, 64)
    first, second = streamed_product(
        normed_rows(h, norm), [w, Stacked(stack, 1)], eps=EPS, next_norms=[following, None], programs=6
    )
    x = rms(h64, norm64, EPS)
    assert first.values is None
    assert second.normed is None
    assert_close(second.values, x @ stack64[1].T)
    assert_close(first.normed.scaled, (x @ w64.T) * following64)
    assert first.normed.square_sums.shape == (8, 8), "4 parts, padded to 8"
    assert_close(first.normed.square_sums.sum(axis=1), np.sum((x @ w64.T) ** 2, axis=1), 2.0**-6)  # of squares


@on_a_cpu
def test_a_product_of_each_group_fills_up_its_rows(two_stages):
    rng = np.random.default_rng(1)
    (x, x64), (w, w64) = draw(rng, 7, 3, 1280), draw(rng, 3, 16, 1280)
    (result,) = streamed_product(x, [w], programs=6)
    wanted = np.einsum("mgk,gnk->mgn", x64, w64).reshape(7, 48)
    assert_close(result.values[:7], wanted)
    assert not np.asarray(result.values[7]).any(), "a row that is not there has a sum"


@on_a_cpu
@pytest.mark.parametrize(("rows", "programs"), [(16, 8), (40, 8), (72, 4)])
def test_a_residual_and_the_norm_behind_it(rows, programs):
    """With 40 rows an instruction has one chunk, and weight rows of the next; 72 are finished in two turns of 40."""
    rng = np.random.default_rng(2)
    (x, x64), (w, w64), (residual, residual64), (norm, norm64) = (
        draw(rng, rows, 64),
        draw(rng, 128, 64),
        draw(rng, rows, 128),
        draw(rng, 128),
    )
    (result,) = streamed_product(x, [w], residual=residual, next_norms=[norm], programs=programs)
    h = residual64 + x64 @ w64.T
    assert_close(result.values, h)
    rounded = np.asarray(result.values, np.float64)
    assert_close(result.normed.scaled, rounded * norm64, 2.0**-8)  # one rounding
    assert_close(result.normed.square_sums.sum(axis=1), np.sum(rounded**2, axis=1), 1e-5)  # fp32
    (again,) = streamed_product(Normed(*result.normed), [w.T], eps=EPS, programs=4)
    assert_close(again.values, rms(rounded, norm64, EPS) @ w64)


@on_a_cpu
def test_a_gated_product(two_stages):
    rng = np.random.default_rng(3)
    (h, h64), (norm, norm64), (gate, gate64), (up, up64) = (
        draw(rng, 8, 1280),
        draw(rng, 1280),
        draw(rng, 48, 1280),
        draw(rng, 48, 1280),
    )
    (result,) = streamed_product(normed_rows(h, norm), [gate / 32, up / 32], eps=EPS, gated=True, programs=6)
    x = rms(h64, norm64, EPS) / 32
    assert_close(result.values, silu(x @ gate64.T) * (x @ up64.T))


@on_a_cpu
@pytest.mark.parametrize("rows", [9, 66])
def test_the_contexts_products(rows):
    """Nine rows become sixteen, 66 are too many for the first product's kernel; fp32 becomes bf16."""
    config = dataclasses.replace(SMALL, target_hidden_size=32)
    params = presets.random_drafter(config, 3)
    params = dataclasses.replace(params, hidden_norm=jnp.linspace(0.5, 2, config.hidden_size, dtype=jnp.bfloat16))
    captured, _ = draw(np.random.default_rng(5), rows, config.captured_size)
    plain = np.asarray(compress_context(params, config, captured), np.float64)
    assert_close(compress_context_in_pallas(params, config, captured.astype(jnp.float32)), plain, 2 * ROUNDING)


@on_a_cpu
def test_the_heads_product():
    """Nine rows become sixteen, fp32 becomes bf16; what rows behind the last carry is not in the results."""
    config = dataclasses.replace(SMALL, target_hidden_size=32)
    params = presets.random_drafter(config, 3)
    rng = np.random.default_rng(5)
    hidden, hidden64 = draw(rng, 3, 3, config.hidden_size)
    head, head64 = draw(rng, 24, config.hidden_size)
    logits = draft_logits_in_pallas(params.with_lm_head(head), hidden.astype(jnp.float32))
    assert logits.dtype == jnp.float32
    assert_close(logits, hidden64 @ head64.T)
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16), err_msg="not rounded to the head's dtype")


def test_rows_and_cluster(monkeypatch):
    """At K3 rank shapes the programs of most launches run all at once, and few multiprocessors are idle."""
    for rows in (8, 32, 64):
        assert rows_and_cluster([1536, 576], rows, 7168, 132) == (16, 1)  # 132 programs
        assert rows_and_cluster([1536], rows, 1536, 132) == (16, 1)
        assert rows_and_cluster([7168], rows, 1024, 132) == (56, 1)  # 128
        assert rows_and_cluster([1792], rows, 7168, 132, gated=True) == (32, 1)  # 112
        assert rows_and_cluster([64 * 1000], rows, 7168, 132) == (64, 1), "more tiles than programs"
    assert rows_and_cluster([20480], 8, 7168, 132) == (40, 1)  # 4 turns of 40 rows, not 3 of 64
    assert rows_and_cluster([1024], 8, 512, 132, group=128) == (8, 1)
    with pytest.raises(ValueError, match=r"\[12\] rows do not divide into runs of 8"):
        rows_and_cluster([12], 8, 7168, 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rows_and_cluster([1536, 576], 8, 7168, 132) == (16, 1), "the rows of x are few"
    assert rows_and_cluster([1536, 576], 112, 7168, 132) == (32, 2)
    assert rows_and_cluster([1792], 112, 7168, 132, gated=True) == (64, 2)
    assert rows_and_cluster([1536, 576], 64, 7168, 132) == (16, 1)
    assert rows_and_cluster([7168], 112, 1024, 132) == (56, 1), "there are enough programs"
    assert rows_and_cluster([1536], 224, 1536, 132)[1] == 1, "half of the contraction is too short"
    assert rows_and_cluster([576], 96, 7168, 132) == (24, 4)
    assert rows_and_cluster([64], 240, 7168, 132)[1] == 2, "240 rows are no four times 8"
    assert rows_and_cluster([1024], 112, 512, 132, group=128) == (8, 1)


@on_a_cpu
@pytest.mark.parametrize("rows", [7, 9, 72])
def test_attention_operands(rows):
    """The queries' products and rotation, some of them beyond the tables; the latents have `norm_rope`'s bits.

    7 and 72 rows leave by the copy engine, the latter in two turns; 9 one by one.
    """
    rng = np.random.default_rng(4)
    heads, nope, rank, rope, length = 2, 64, 128, 128, 50
    there = padded(rows)
    (q, q64), (k_b, k_b64), (compressed, _), (norm, _) = (
        draw(rng, there, heads * (nope + rope)), draw(rng, heads, nope, rank), draw(rng, there, rank + rope), draw(rng, rank)
    )  # fmt: skip
    positions = np.resize(np.array([0, 49, 7, 60, -3, 12, 31], np.int32), rows)
    angles = rng.uniform(0, 6, (length, rope // 2))
    tables = [jnp.asarray(x, jnp.float32) for x in (np.cos(angles), np.sin(angles))]
    query, latents = attention_operands(q, compressed, positions, k_b, norm, *tables, eps=EPS)
    wanted = ops.norm_rope(compressed[:rows, None], positions, norm[None], *tables, eps=EPS)
    assert compare(latents, wanted[:, 0])
    q64 = q64[:rows].reshape(rows, heads, -1)
    assert_close(query[..., :rank], np.einsum("mhn,hnr->mhr", q64[..., :nope], k_b64))
    re, im = q64[..., nope::2], q64[..., nope + 1 :: 2]
    at = np.clip(positions, 0, length - 1)
    cos, sin = np.cos(angles[at])[:, None], np.sin(angles[at])[:, None]
    assert_close(query[..., rank::2], re * cos - im * sin)
    assert_close(query[..., rank + 1 :: 2], re * sin + im * cos)


def test_the_most_that_attention_operands_takes_fits_into_shared_memory(monkeypatch):
    """Of rows and `qk_nope_head_dim`; with a tile more of the latter it would not."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rank, rope = 512, 64

    def lower(rows: int, nope: int) -> None:
        table = (99, rope // 2)
        shapes = (rows, 2 * (nope + rope)), (rows, rank + rope), (rows,), (2, nope, rank), (rank,), table, table
        dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32
        operands = [jax.ShapeDtypeStruct(*of) for of in zip(shapes, dtypes)]
        attention_operands.trace(*operands, eps=EPS).lower(lowering_platforms=("cuda",))

    for rows in (8, 64, streaming.MAX_ROWS):
        lower(rows, most_nope(rows))
        with pytest.raises(ValueError, match="exceeds available shared memory"):
            lower(rows, most_nope(rows) + 64)


def attend(layer: int, query: jax.Array, latents: jax.Array) -> jax.Array:
    """Attention over the block alone, other in every layer."""
    scores = jnp.einsum("bthd,bkd->bthk", query.astype(jnp.float32), latents.astype(jnp.float32)) * (0.05 + layer / 40)
    values = latents[..., : latents.shape[-1] - 64].astype(jnp.float32)
    return jnp.einsum("bthk,bkr->bthr", jax.nn.softmax(scores, axis=-1), values).astype(query.dtype)


def compare_layers(config, B: int, bound: float, **sizes) -> None:
    """Plain and Pallas layers on the same noise; the bound is on the root mean square of the difference."""
    params = presets.k3_rank_drafter(0) if config == presets.K3_RANK else presets.random_drafter(config, 0)
    tables = [jnp.asarray(table) for table in yarn_tables(config, 256)]
    noise = jax.random.normal(jax.random.key(B), (B, 7, config.hidden_size), jnp.bfloat16)
    positions = jnp.arange(7) + 9 * jnp.arange(B)[:, None]
    plain = jax.jit(lambda params, noise: block_layers(params, config, noise, positions, attend, *tables))(params, noise)
    call = jax.jit(lambda params, noise: kernels.block_layers(params, config, noise, positions, attend, *tables, **sizes))
    found = call(params, noise)
    for name, x, y in zip(("hidden", "latents"), plain, found):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2)) < bound, name
    if jax.default_backend() == "gpu":
        for once, again in zip(found, call(params, noise)):
            np.testing.assert_array_equal(np.asarray(once).view(np.int16), np.asarray(again).view(np.int16))


@on_a_cpu
@pytest.mark.parametrize("B", [1, 10])
def test_interpreted_layers(B):
    """70 rows become 80."""
    compare_layers(SMALL, B, 0.015, programs=4)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 4, 5, 8, 10, 16, 24, 32])
def test_layers_on_a_gpu(B):
    compare_layers(presets.K3_RANK, B, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "rows", "cluster"), [(576, 96, 4), (1024, 208, 2)])
def test_a_divided_contraction_on_a_gpu(N, rows, cluster):
    """With all that may stand behind a product, which at K3 shapes only undivided ones have."""
    assert rows_and_cluster([N], rows, 7168, 132)[1] == cluster
    keys = jax.random.split(jax.random.key(N), 4)
    shapes = (rows, 7168), (N, 7168), (rows, N), (N,)
    x, w, residual, norm = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    x64, w64, residual64, norm64 = (np.asarray(operand.astype(jnp.float32), np.float64) for operand in (x, w, residual, norm))
    (result,) = streamed_product(x, [w], residual=residual, next_norms=[norm])
    assert_close(result.values, residual64 + x64 @ w64.T)
    rounded = np.asarray(result.values.astype(jnp.float32), np.float64)
    assert_close(result.normed.scaled, rounded * norm64, 2.0**-8)  # one rounding
    assert_close(result.normed.square_sums.sum(axis=1), np.sum(rounded**2, axis=1), 1e-5)  # fp32


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 3, 4, 5, 8, 16, 32])
def test_products_around_the_layers_on_a_gpu(B):
    config, params = presets.K3_RANK, presets.k3_rank_drafter(0)
    captured = jax.random.normal(jax.random.key(B), (8 * B, config.captured_size), jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(B + 9), (B, 7, config.hidden_size), jnp.bfloat16)
    plain = jax.jit(lambda params, x: compress_context(params, config, x))(params, captured)
    found = jax.jit(lambda params, x: compress_context_in_pallas(params, config, x))(params, captured)
    assert_close(found, np.asarray(plain, np.float64), 2 * ROUNDING)
    if 7 * B > 64:  # rows for which the step has XLA's product
        return
    plain = jax.jit(draft_logits)(params, hidden)
    found = jax.jit(draft_logits_in_pallas)(params, hidden)
    assert_close(found, np.asarray(plain, np.float64))
    assert np.asarray(found).any(axis=(1, 2)).all()


def test_what_the_kernels_do_not_take_is_named(monkeypatch):
    shape = LayersShape(presets.K3_RANK, 7, ("bfloat16",))
    reason = kernels.unsupported(shape)
    assert reason is None if jax.default_backend() == "gpu" else reason.startswith("off a GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels.unsupported(shape) is None
    assert "257" in kernels.unsupported(dataclasses.replace(shape, rows=257))
    assert "float32" in kernels.unsupported(dataclasses.replace(shape, dtypes=("float32",)))
    wrong = {
        "hidden_size": 7000,
        "q_lora_rank": 100,
        "qk_rope_head_dim": 32,
        "v_head_dim": 4,
        "kv_lora_rank": 448,
        "qk_nope_head_dim": 1536,
    }
    for field, value in wrong.items():
        config = dataclasses.replace(presets.K3_RANK, **{field: value})
        assert f"{field} is {value}" in kernels.unsupported(dataclasses.replace(shape, config=config))


def test_what_a_streamed_product_does_not_take_is_named(monkeypatch):
    shape = ProductShape(8, (("fc", 7168, 35840), ("kv_a_proj", 2880, 7168)), ("bfloat16",))
    reason = streaming.unsupported(shape)
    assert reason is None if jax.default_backend() == "gpu" else reason.startswith("off a GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert streaming.unsupported(shape) is None
    assert "257 rows" in streaming.unsupported(dataclasses.replace(shape, rows=257))
    assert unsupported_head(dataclasses.replace(shape, rows=64)) is None
    assert "65 rows, XLA's" in unsupported_head(dataclasses.replace(shape, rows=65))
    assert "bfloat16, float32" in streaming.unsupported(dataclasses.replace(shape, dtypes=("bfloat16", "float32")))
    assert "fc is [7168, 100]" in streaming.unsupported(dataclasses.replace(shape, weights=(("fc", 7168, 100),)))
    assert "lm_head is [9, 64]" in streaming.unsupported(dataclasses.replace(shape, weights=(("lm_head", 9, 64),)))


def test_the_kernels_lower_for_a_gpu_at_k3_shapes(monkeypatch):
    """Shared memory and layouts are decided there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = dataclasses.replace(presets.K3_RANK, num_hidden_layers=1)
    params = jax.eval_shape(lambda: presets.random_drafter(config, 0, on_device=True))
    table = jax.ShapeDtypeStruct((99, 32), jnp.float32)
    for B in (1, 4, 8, 10, 32):  # 28 rows become 32, 70 become 80
        noise, positions = jax.ShapeDtypeStruct((B, 7, 7168), jnp.bfloat16), jax.ShapeDtypeStruct((B, 7), jnp.int32)

        def layers(params, noise, positions, cos, sin):
            return kernels.block_layers(params, config, noise, positions, attend, cos, sin)

        lowered = jax.jit(layers).trace(params, noise, positions, table, table).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu_v2") == 7, "launches of a layer besides the attention"

        def around(params, captured, hidden):
            return compress_context_in_pallas(params, config, captured), draft_logits_in_pallas(params, hidden)

        captured = jax.ShapeDtypeStruct((8 * B, config.captured_size), jnp.bfloat16)
        lowered = jax.jit(around).trace(params, captured, noise).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu_v2") == (3 if B <= 8 else 2), "fc is XLA's above 64 rows"
