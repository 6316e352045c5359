"""Whole steps in every bit on a GPU: JAX's jitted step, the torch twin and its CUDA graph, floats from one Triton source."""

import dataclasses

import jax.numpy as jnp
import pytest
import torch

from jdspark import Geometry, StepOptions
from jdspark.presets import SMALL_K3, random_drafter
from torch_bridge import compare, triton_kernels
from torch_bridge.step_parity import LAYOUTS, PROMPTS, run_step_parity
from torch_bridge.whole_step import compare_step_bits

from .mistakes import MISTAKES

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(
    max_batch=5, max_draft_len=7, page_size=32, num_pages=64, max_blocks_per_seq=8, max_ctx=200, offset_divisor=10
)
OPTIONS = StepOptions(backend="pallas", float_backend="triton", fused_prologue=True)


@pytest.fixture(scope="module")
def params():
    return random_drafter(SMALL_K3, 0)


@pytest.mark.parametrize("B", PROMPTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_of_k3_over_a_hundred_steps(layout, B):
    for run in run_step_parity("cuda", 100, layouts=[layout], batches=[B]):
        failures = {row.op: row.failures[:1] for row in run.exact_rows if row.failures}
        assert run.agreed, (run.fused_prologue, run.overlap_context_projection, failures)
        cases = {(row.backends[1], row.op): row.cases for row in run.exact_rows}
        assert cases["torch", "state: pool"] == cases["torch graph", "block_hidden"] == 100
        assert {n for step in run.accepted for n in step} == set(range(1, 9))
        assert set(run.fast) == ({"pallas", "xla"} if run.fused_prologue and run.overlap_context_projection else set())
        assert all(of_outputs["accepted_tokens"][0] == 0 for of_outputs in run.fast.values())


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_the_exact_ops_may_run_anywhere(params, backend):
    options = dataclasses.replace(OPTIONS, backend=backend)
    report = compare_step_bits(SMALL_K3, params, GEOMETRY, options=options, num_steps=3, context_steps=(1,))
    assert report.agreed, {row.op: row.failures[:1] for row in report.rows if row.failures}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(params, monkeypatch, name):
    make, where = MISTAKES[name]
    make(monkeypatch)
    steps = 12 if name == "stale_page_table" else 1
    report = compare_step_bits(SMALL_K3, params, GEOMETRY, options=OPTIONS, num_steps=steps)
    for side in ("torch", "torch graph"):
        assert where in {row.op for row in report.rows if row.failures and row.backends[1] == side}


def test_a_row_does_not_depend_on_its_batch():
    """More rows, other rows, another place in the batch: the same bits."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, weight = draw(200, 7168), draw(1536, 7168)
    all_rows = triton_kernels.linear(x, weight)
    for first, rows in ((0, 8), (5, 1), (100, 64), (7, 33)):
        assert torch.equal(triton_kernels.linear(x[first : first + rows], weight), all_rows[first : first + rows])
    query, block, pool = draw(4, 7, 8, 576), draw(4, 7, 576), draw(2, 90, 32, 576)
    table = torch.randperm(80, device="cuda").view(4, 20).int()
    lengths = torch.tensor([0, 1, 333, 640], device="cuda", dtype=torch.int32)
    static = {"layer": 1, "scale": 0.07, "kv_lora_rank": 512}
    together = triton_kernels.block_attention(query, block, pool, table, lengths, **static)
    for b in range(4):
        one = slice(b, b + 1)
        alone = triton_kernels.block_attention(query[one], block[one], pool, table[one], lengths[one], **static)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("length", [0, 1, 31, 333, 640])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_against_float64(layout, length):
    """Shuffled pages; every key that may not be seen is NaN. Bound: softmax weights rounded to bf16."""
    torch.manual_seed(length)
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    query, block, pool = draw(1, 7, 8, 576), draw(1, 7, 576), draw(3, 40, 32, 576)
    table = torch.randperm(40, device="cuda")[:20].view(1, 20).int()
    keys = pool[2, table[0].long()].flatten(0, 1)[:length].double()
    hidden = torch.ones(40 * 32, dtype=torch.bool, device="cuda")
    position = torch.arange(length, device="cuda")
    hidden[table[0].long()[position // 32] * 32 + position % 32] = False
    pool.flatten(1, 2)[:, hidden] = float("nan")
    pool = pool if layout == "layer_major" else pool.transpose(0, 1).contiguous()
    lengths = torch.tensor([length], device="cuda", dtype=torch.int32)
    got = triton_kernels.block_attention(
        query, block, pool, table, lengths, layer=2, scale=0.07, kv_lora_rank=512, layout=layout
    )
    keys = torch.cat([keys, block[0].double()])
    weights = (query[0].flatten(0, 1).double() @ keys.T * 0.07).softmax(-1)
    wanted = (weights @ keys[:, :512]).view(7, 8, 512)
    assert float((got[0].double() - wanted).abs().max() / wanted.abs().max()) < 2**-7


def test_compare_finds_one_bit_on_the_gpu():
    a = jnp.arange(1 << 20, dtype=jnp.bfloat16)
    b = torch.arange(1 << 20, device="cuda", dtype=torch.float32).to(torch.bfloat16)
    assert compare(a, b)
    b.view(torch.int16)[77] ^= 1
    assert compare(a, b).where == (77,)
    assert not compare(a, b.float())
