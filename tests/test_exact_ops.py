"""The exact ops, bit for bit: the plain JAX definition and the torch chain against loops over Python integers."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jdspark import ops
from jdspark.ops.row_argmax import better
from torch_bridge import compare, eager, to_torch
from torch_bridge.cases import EXACT_OPS, FAMILIES, SHAPES, draw_case
from torch_bridge.eager.latent_pool import write_latents
from torch_bridge.parity import run

from . import oracle

CASES = len(SHAPES) * len(FAMILIES)


@pytest.mark.parametrize("backend", ["xla", "torch eager"])
@pytest.mark.parametrize("op", EXACT_OPS)
def test_agrees_with_the_loops_in_every_bit(op, backend):
    seen = set()
    for index in range(CASES):
        case = draw_case(op, index, seed=1)
        seen.add((case.label.split(",")[0], index % len(SHAPES)))
        wanted = getattr(oracle, op)(**case.operands, **case.static)
        got = run(case, backend, "cpu")
        assert len(got) == len(wanted)
        for number, (a, b) in enumerate(zip(got, wanted)):
            comparison = compare(a, b)
            assert comparison, f"case {index} ({case.label}), output {number}: {comparison.detail}"
    assert len(seen) == CASES, "every family meets every shape"


@pytest.mark.parametrize("op", ["store_gen_context", "scatter_context", "write_block_latents"])
def test_cases_write_something_and_leave_something(op):
    """The comparison above would be empty if the cases never wrote, or wrote everywhere."""
    written, untouched = 0, 0
    for index in range(CASES):
        case = draw_case(op, index, seed=1)
        before, (after,) = case.operands["pool"], getattr(oracle, op)(**case.operands, **case.static)
        changed = oracle.bits(before) != oracle.bits(after)
        written, untouched = written + changed.any(), untouched + (~changed).any()
    assert written > CASES / 2
    assert untouched == CASES


def all_patterns(dtype):
    """Every bf16 bit pattern, or as many fp32 ones: NaN payloads, subnormals, both zeros."""
    patterns = np.arange(65536, dtype=np.uint16)
    if dtype == "bfloat16":
        return patterns.view(ml_dtypes.bfloat16).reshape(64, 1024)
    wide = (patterns.astype(np.uint32) << 16) | np.random.default_rng(0).integers(0, 65536, 65536, dtype=np.uint32)
    return wide.view(np.float32).reshape(64, 1024)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
def test_moved_latents_keep_every_bit(dtype, layout):
    values = all_patterns(dtype)
    latents = values.reshape(32, 2, 1024)  # 4 requests x 8 tokens, 2 layers
    outer = (2, 16) if layout == "layer_major" else (16, 2)
    pool = np.ones((*outer, 4, 1024), values.dtype)
    table = np.arange(16, dtype=np.int32).reshape(4, 4)
    slots, eight = np.arange(4, dtype=np.int32), np.full(4, 8, np.int32)
    stored = ops.store_gen_context(
        pool, latents, np.zeros(5, np.int32), slots, eight, table, np.full(4, 4, np.int32), layout=layout
    )
    rows, positions = np.repeat(slots, 8), np.tile(np.arange(8, dtype=np.int32), 4)
    scattered = ops.scatter_context(pool, latents, rows, positions, table, layout=layout)
    placement = ops.block_placement(jnp.zeros(4, jnp.int32), table, block_size=8, page_size=4)
    block = latents.reshape(4, 8, 2, 1024).transpose(2, 0, 1, 3)
    placed = ops.write_block_latents(pool, block, placement, layout=layout)
    per_layer = pool
    for layer in range(2):
        per_layer = ops.write_block_latents(per_layer, block[layer], placement, layout=layout, layer=layer)
    for name, result in [("store", stored), ("scatter", scattered), ("block", placed), ("by layer", per_layer)]:
        pages = np.asarray(result) if layout == "page_major" else np.asarray(result).swapaxes(0, 1)
        written = pages.reshape(4, 4, 2, 4, 1024)[:, :2].transpose(0, 1, 3, 2, 4).reshape(32, 2, 1024)
        assert compare(written, latents), name
        finite = ~np.isnan(latents)
        assert np.array_equal(oracle.bits(np.ascontiguousarray(written))[finite], oracle.bits(latents)[finite]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocab", [1, 64])
def test_noise_block_keeps_every_bit(dtype, vocab):
    embedding = all_patterns(dtype)[:vocab]
    bonus = np.arange(vocab, dtype=np.int32)
    run_op = jax.jit(ops.noise_block, static_argnames=("block_size", "mask_token_id"))
    for mask_token_id in range(vocab):
        block = run_op(embedding, bonus, block_size=3, mask_token_id=mask_token_id)
        assert compare(block[:, 0], embedding)
        assert compare(block[:, 1:], np.broadcast_to(embedding[mask_token_id], (vocab, 2, 1024)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rejected_tokens_write_their_product_with_zero(dtype):
    values = all_patterns(dtype)
    latents = np.stack([np.ones_like(values), values], axis=1).reshape(128, 1, 1024)  # token 1 of each pair is rejected
    pool = np.full((1, 64, 2, 1024), 3, values.dtype)
    table, one = np.arange(64, dtype=np.int32)[:, None], np.ones(64, np.int32)
    pool = ops.store_gen_context(pool, latents, np.zeros(65, np.int32), np.arange(64, dtype=np.int32), one, table, one)
    rejected = np.asarray(pool)[0, :, 1]
    finite = np.isfinite(values)
    assert np.isnan(rejected[~finite]).all()
    assert (rejected[finite] == 0).all()
    assert np.array_equal(np.signbit(rejected[finite]), np.signbit(values[finite]))


@pytest.mark.parametrize("module", [ops, eager])
def test_the_last_of_several_writes_to_one_place_wins(module):
    """Two requests whose tables alias, and clamped columns of one request: (b, j) order decides."""
    pool = np.zeros((1, 3, 2, 1), np.float32)
    latents = np.arange(1, 7, dtype=np.float32).reshape(6, 1, 1)
    ctx_len, slots, n = np.array([3, 0, 0], np.int32), np.array([0, 1], np.int32), np.array([3, 3], np.int32)
    tables, counts = np.array([[1, 2], [2, 1]], np.int32), np.array([2, 2], np.int32)
    operands = [pool, latents, ctx_len, slots, n, tables, counts]
    if module is eager:
        operands = [to_torch(jnp.asarray(x), copy=True) for x in operands]
    result = module.store_gen_context(*operands)
    # request 0 clamps to column 3 (page 2, offset 1): 3 is its last; request 1 writes page 2 and page 1 after it
    assert np.asarray(result).reshape(3, 2).tolist() == [[0, 0], [6, 0], [4, 5]]


def test_the_better_candidate_is_the_same_in_every_tree():
    """A GPU reduces a row in an order of its own."""
    rng = np.random.default_rng(0)
    values = np.array([np.nan, np.nan, np.inf, np.inf, 1.0, 0.0, -0.0, -np.inf, -np.inf, np.nan], np.float32)
    for _ in range(20):
        row = rng.permutation(values)[: rng.integers(2, 11)]
        candidates = [(jnp.asarray(value), jnp.int32(i)) for i, value in enumerate(row)]
        while len(candidates) > 1:
            one, other = (candidates.pop(rng.integers(len(candidates))) for _ in range(2))
            candidates.append(better(one, other))
        assert int(candidates[0][1]) == torch.from_numpy(row).argmax().item()


def test_argmax_follows_torch():
    nan, inf = np.nan, np.inf
    rows = np.array([[1, nan, inf, nan], [0.0, -0.0, 0.0, -1], [-inf, -inf, -inf, -inf], [3, 5, 5, 2]], np.float32)
    wanted = [1, 0, 0, 1]
    accepted, _ = ops.accept_strict(rows, np.zeros((0, 0), np.int32), num_contexts=4)
    assert accepted[:, 0].tolist() == wanted == torch.from_numpy(rows).argmax(-1).tolist()
    flags = np.zeros((4, 1), np.float32)
    _, tokens = ops.markov_chain(rows[:, None], np.zeros(4, np.int32), flags, flags)
    assert tokens[:, 0].tolist() == wanted


def test_a_chain_of_picks_has_the_gradient_of_its_logits():
    """Research differentiates through the step; the picks themselves have none."""
    base, weights = jnp.arange(12.0).reshape(1, 3, 4), jnp.ones((4, 2))

    def last_logits(base):
        return ops.markov_chain(base, jnp.zeros(1, jnp.int32), weights, weights)[0][0, 2].sum()

    assert jax.grad(last_logits)(base).tolist() == [[[0] * 4, [0] * 4, [1] * 4]]


def test_forced_acceptance_averages_its_fraction_and_stops_at_k():
    B, K = 64, 7
    logits, drafts = np.zeros((B * (K + 1), 5), np.float32), np.full((B, K), 4, np.int32)
    counts = [ops.accept_strict(logits, drafts, force=2.25, force_counter=counter)[1] for counter in range(60)]
    assert set(np.unique(counts)) == {3, 4}
    assert np.mean(counts) == pytest.approx(3.25, abs=0.03)  # 3840 draws: three standard deviations are 0.02
    assert set(np.asarray(ops.accept_strict(logits, drafts, force=99.5)[1])) == {K + 1}
    assert set(np.asarray(ops.accept_strict(logits, drafts)[1])) == {1}


def test_forced_acceptance_index_survives_a_large_counter():
    """counter * 1000003 leaves int32 after 2147 steps; the wrapped product still names the same table entry."""
    B, K = 3, 7
    logits, drafts = np.zeros((B * (K + 1), 5), np.float32), np.full((B, K), 4, np.int32)
    for counter in (2146, 2147, 10**6, 2**31 - 2):
        wanted = oracle.accept_strict(logits, drafts, force=0.5, force_counter=counter)[1]
        assert compare(ops.accept_strict(logits, drafts, force=0.5, force_counter=counter)[1], wanted)
        torch_logits, torch_drafts = torch.from_numpy(logits), torch.from_numpy(drafts)
        assert compare(eager.accept_strict(torch_logits, torch_drafts, force=0.5, force_counter=counter)[1], wanted)


def test_a_changed_comparison_is_noticed():
    """Negative control: each of these single mistakes in the operands must make the outputs differ."""
    case = draw_case("store_gen_context", 0, seed=1)
    reference = run(case, "xla", "cpu")[0]
    for name, change in {
        "num_accepted": lambda n: np.where(n > 1, n - 1, n + 1),
        "ctx_len": lambda c: c + 1,
        "block_tables": lambda t: np.roll(t, 1, axis=1),
        "latents": lambda x: -x,
    }.items():
        mistaken = dataclasses.replace(case, operands=case.operands | {name: change(case.operands[name])})
        assert not compare(run(mistaken, "torch eager", "cpu")[0], reference), name


@pytest.mark.long
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
def test_torch_compile_writes_the_pool_in_place(layout, layer):
    """As the benchmark's peer it would otherwise be timed copying the pool, there and back."""
    from torch._inductor.utils import run_and_get_code  # takes seconds

    shape = (2, 40, 8, 16) if layout == "layer_major" else (40, 2, 8, 16)
    generator = torch.Generator().manual_seed(0)
    pool, latents = torch.randn(shape, generator=generator), torch.randn((5, 2, 16), generator=generator)
    latents = latents if layer is None else latents[:, layer]
    pages, offsets = torch.tensor([3, 7, -1, 9, 3]), torch.tensor([0, 1, 2, 3, 0])
    expected = pool.clone()
    write_latents(expected, latents, pages, offsets, layout, layer)
    torch.compiler.reset()
    _, code = run_and_get_code(torch.compile(write_latents, dynamic=False), pool, latents, pages, offsets, layout, layer)
    assert compare(pool, expected)
    buffers = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", "\n".join(code))
    assert buffers
    assert max(math.prod(int(n) for n in sizes.split(",") if n.strip()) for sizes in buffers) < pool.numel() // 8
