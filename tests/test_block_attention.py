"""The paged block attention's kernels against fp64 on NumPy, and how the split divides its work.

A CPU runs the kernels in an interpreter that has no tensor cores: there the two products are plain JAX, and everything else
(copies, barriers, masks, the division of work, the merge) is the kernels'. K3 shapes are for a GPU.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdspark import Geometry, StepOptions, init_state, make_decode_step, ops
from jdspark.ops.backends import BackendUnavailable, why_unavailable
from jdspark.ops.block_attention import AttentionShape
from jdspark.paths import Path, choose_path
from jdspark.presets import SMALL_K3, random_drafter
from pallas_kernels import block_attention as kernels
from torch_bridge import compare
from torch_bridge.whole_step import ScriptedTarget

BOUND = 2.0**-7
"""On max|out - reference| / max|reference|: bf16 operands, weights and partial sums."""

K3 = AttentionShape(B=1, block_size=7, width=576, kv_lora_rank=512, page_size=32, dtypes=("bfloat16",))


@dataclasses.dataclass
class Attention:
    """Random operands of one call; every key that it must not see is NaN, on a page of its own request or of nobody's."""

    query: jax.Array
    block_latents: jax.Array
    pool: jax.Array
    page_tables: jax.Array
    advertised: jax.Array
    layer: int
    scale: float
    kv_lora_rank: int
    layout: str

    @classmethod
    def draw(
        cls, advertised, *, page_size, max_blocks, layout="layer_major", block_size=7, heads=8, width=576, rank=512,
        holes=(), seed=0,
    ):  # fmt: skip
        """`holes`: (request, column, number) of pages that are not there."""
        rng = np.random.default_rng(seed)
        B, num_layers, layer = len(advertised), 2, 1
        tables = rng.permutation(B * max_blocks + 3)[: B * max_blocks].reshape(B, max_blocks)
        visible = np.zeros((B * max_blocks + 3, page_size), bool)
        for b, tokens in enumerate(np.clip(advertised, 0, max_blocks * page_size)):
            positions = np.arange(tokens)
            visible[tables[b, positions // page_size], positions % page_size] = True
        for b, column, _ in holes:
            visible[tables[b, column]] = False
        pool = np.full((num_layers, *visible.shape, width), np.nan, np.float32)
        pool[layer][visible] = rng.standard_normal((visible.sum(), width))
        for b, column, number in holes:
            tables[b, column] = number
        return cls(
            query=jnp.asarray(rng.standard_normal((B, block_size, heads, width)), jnp.bfloat16),
            block_latents=jnp.asarray(rng.standard_normal((B, block_size, width)), jnp.bfloat16),
            pool=jnp.asarray(pool if layout == "layer_major" else pool.swapaxes(0, 1), jnp.bfloat16),
            page_tables=jnp.asarray(tables, jnp.int32),
            advertised=jnp.asarray(advertised, jnp.int32),
            layer=layer,
            scale=0.07,
            kv_lora_rank=rank,
            layout=layout,
        )

    def arguments(self):
        operands = (self.query, self.block_latents, self.pool, self.page_tables, self.advertised)
        return operands, {name: getattr(self, name) for name in ("layer", "scale", "kv_lora_rank", "layout")}

    def reference(self):
        """In fp64, one request after the other."""
        query, block, pool = (np.asarray(x.astype(jnp.float32)) for x in (self.query, self.block_latents, self.pool))
        pool = pool[self.layer] if self.layout == "layer_major" else pool[:, self.layer]
        num_pages, page_size, _ = pool.shape
        outputs = []
        for b, tokens in enumerate(np.asarray(self.advertised)):
            positions = np.arange(np.clip(tokens, 0, self.page_tables.shape[1] * page_size))
            pages = np.asarray(self.page_tables)[b, positions // page_size]
            there = (pages >= 0) & (pages < num_pages)
            keys = np.concatenate([pool[pages[there], positions[there] % page_size], block[b]]).astype(np.float64)
            scores = np.einsum("thd,kd->thk", query[b].astype(np.float64), keys, optimize=True) * self.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            outputs.append(np.einsum("thk,kr->thr", weights, keys[:, : self.kv_lora_rank], optimize=True))
        return np.stack(outputs)

    def check(self, output):
        assert output.dtype == jnp.bfloat16
        output, reference = np.asarray(output.astype(jnp.float32)), self.reference()
        assert output.shape == reference.shape
        assert np.isfinite(output).all(), "something that must not be seen was"
        assert np.abs(output - reference).max() <= BOUND * np.abs(reference).max()
        assert np.linalg.norm(output - reference) <= 2.0**-8 * np.linalg.norm(reference)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([-5, 0, 1, 63, 64, 65, 700, 9999]) | st.integers(0, 2000), min_size=1, max_size=9),
    programs=st.integers(1, 40),
)
def test_the_programs_divide_the_tiles_evenly(tokens, programs):
    limit = 1920
    counts = [int(kernels.num_tiles(jnp.int32(n), limit)) for n in tokens]
    assert counts == [-(-min(max(n, 0), limit) // 64) + 1 for n in tokens]
    line = [(b, tile) for b, count in enumerate(counts) for tile in range(count)]
    taken, indices, shares = [], [], []
    for program in range(programs):
        begin, end, first, behind, start = (
            int(x) for x in kernels.requests_of([jnp.int32(n) for n in counts], jnp.int32(program), programs)
        )
        shares.append(end - begin)
        for b in range(first, behind):
            low, high = max(begin - start, 0), min(end - start, counts[b])
            assert low < high, "a piece without a tile"
            taken += [(b, tile) for tile in range(low, high)]
            indices.append(program + b)
            start += counts[b]
    assert taken == line
    assert sum(shares) == len(line)
    assert max(shares) - min(shares) <= 1
    assert len(set(indices)) == len(indices)
    assert max(indices) < programs + len(tokens) - 1


SMALL = {"width": 192, "rank": 128}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter; the GPU runs K3 shapes below")
@pytest.mark.parametrize(
    "case",
    [
        Attention.draw([100, 0, 1], page_size=32, max_blocks=4, block_size=3, heads=2, **SMALL),
        Attention.draw([64, 128], page_size=64, max_blocks=2, layout="page_major", block_size=9, heads=1, **SMALL),
        Attention.draw(
            [150, 99, 192], page_size=32, max_blocks=6, layout="page_major", block_size=2, heads=2, seed=2, **SMALL,
            holes=[(0, 1, -1), (1, 0, 21), (1, 1, -7), (2, 2, -1), (2, 5, 2**31 - 1)],  # (2, 2): a tile's first page only
        ),
        Attention.draw([140, 200], page_size=128, max_blocks=2, block_size=2, heads=1, seed=4, **SMALL),
        Attention.draw([70], page_size=64, max_blocks=2, block_size=2, heads=1, seed=5),  # two products of values per warpgroup
    ],
    ids=["ragged", "full pages", "holes", "two tiles a page", "wide"],
)  # fmt: skip
def test_interpreted_kernels_against_fp64(case):
    operands, static = case.arguments()
    case.check(kernels.attend(*operands, **static, programs=3))


@pytest.mark.parametrize("pieces", [[36], [150], [40, 2, 15]])
def test_the_merge_takes_more_pieces_than_at_once(pieces, monkeypatch):
    """Maxima that rise and fall over several warpgroups and rounds; what no program wrote is NaN. Each program
    discards what it alone reads."""
    B, rank, rows = len(pieces), 256, 3
    discarded = []

    def discard(of_row, count, warpgroups):
        _, piece, row, part = of_row.transforms[-1].indices
        jax.debug.callback(lambda *where: discarded.append(tuple(int(x) for x in where)), piece.start, count, row, part.start)

    monkeypatch.setattr(kernels, "discard", discard)
    kernels.merge.clear_cache()
    rng = np.random.default_rng(B)
    last = np.cumsum(np.array(pieces) - 1)  # a program ends one request and begins the next
    bounds, programs = np.stack([last - pieces + 1, last], axis=1), int(last[-1]) + 2
    written = programs - 1 + B - 1
    sums = np.full((1, programs + B - 1, 8, rank), np.nan)
    stats = np.full((1, 2, 64, programs + B - 1 + kernels.turns(B, programs)[2]), np.nan)
    sums[0, :written] = rng.standard_normal((written, 8, rank))
    stats[0, 0, :8, :written], stats[0, 1, :8, :written] = (
        4 * rng.standard_normal((8, written)),
        rng.uniform(0.5, 3, (8, written)),
    )
    merged = kernels.merge(
        jnp.asarray(sums, jnp.float32), jnp.asarray(stats, jnp.float32), jnp.asarray(bounds[None], jnp.int32),
        num_rows=rows, programs=programs, dtype=jnp.float32,
    )  # fmt: skip
    for b, (begin, end) in enumerate(bounds):
        mine = slice(begin + b, end + b + 1)
        maxima, weights = stats[0, :, :rows, mine]
        scale = 2.0 ** (maxima - maxima.max(axis=1, keepdims=True))
        expected = np.einsum("rp,prk->rk", scale, sums[0, mine, :rows]) / (scale * weights).sum(axis=1)[:, None]
        np.testing.assert_allclose(merged[b], expected, rtol=2e-5, atol=2e-5)  # fp32
    jax.effects_barrier()
    read = [(begin + b, end - begin + 1) for b, (begin, end) in enumerate(bounds)]
    assert set(discarded) == {(*of, row, part) for of in read for row in range(rows) for part in (0, rank // 2)}
    kernels.merge.clear_cache()


def test_the_kernels_lower_for_a_gpu_at_k3_shapes(monkeypatch):
    """Shared memory, registers and layouts are decided there; another shape of query rows, pages and widths as well."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for B, block_size, heads, width, rank, page_size in (
        (1, 7, 8, 576, 512, 32),
        (64, 8, 64, 576, 512, 64),
        (3, 5, 3, 320, 256, 128),
    ):
        bf16, int32 = jnp.bfloat16, jnp.int32
        operands = [
            jax.ShapeDtypeStruct((B, block_size, heads, width), bf16), jax.ShapeDtypeStruct((B, block_size, width), bf16),
            jax.ShapeDtypeStruct((5, 999, page_size, width), bf16), jax.ShapeDtypeStruct((B, 12300), int32),
            jax.ShapeDtypeStruct((B,), int32),
        ]  # fmt: skip
        static = {"layer": 3, "scale": 0.07, "kv_lora_rank": rank, "layout": "layer_major"}
        traced = jax.jit(lambda *args, static=static: kernels.block_attention(*args, **static)).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 2, "two launches, and nothing is gathered"
        assert "stablehlo.gather" not in text


def test_what_the_kernels_do_not_take_is_named(monkeypatch):
    assert kernels.unsupported(K3).startswith("off a GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels.unsupported(K3) is None
    assert kernels.unsupported(dataclasses.replace(K3, B=64, page_size=64, block_size=8)) is None
    refused = {
        "dtypes": ("bfloat16", "float32"), "page_size": 16, "kv_lora_rank": 500, "width": 600, "block_size": 65, "B": 129,
    }  # fmt: skip
    for field, value in refused.items():
        reason = kernels.unsupported(dataclasses.replace(K3, **{field: value}))
        assert reason is not None, field
        assert str(value[1] if field == "dtypes" else value) in reason
    options, dtype = StepOptions(backend="pallas"), jnp.bfloat16
    monkeypatch.setattr("jdspark.paths.why_unavailable", lambda backend: None)
    assert choose_path("block_attention", options, B=1, embedding_dtype=dtype, shape=K3) == Path("pallas")
    narrow = dataclasses.replace(K3, page_size=16)
    path = choose_path("block_attention", options, B=1, embedding_dtype=dtype, shape=narrow)
    assert str(path) == "xla (not pallas: page_size is 16, its kernels copy pages of 32 tokens or a multiple of 64)"
    plain = choose_path("block_attention", StepOptions(fused_prologue=True), B=1, embedding_dtype=dtype, shape=K3)
    assert plain.backend == "xla", "its bits are not XLA's"
    operands, static = Attention.draw([5], page_size=32, max_blocks=1).arguments()
    for scale in (0.0, -0.5, math.nan):
        with pytest.raises(BackendUnavailable, match=rf"scale is {scale}, .* above 0; backend='xla' runs everywhere"):
            kernels.block_attention(*operands, **{**static, "scale": scale})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="pins what happens on a CPU")
def test_on_a_cpu_the_op_says_what_to_do():
    operands, static = Attention.draw([5], page_size=32, max_blocks=1, **SMALL).arguments()
    with pytest.raises(BackendUnavailable, match=r"off a GPU .* backend='xla' runs everywhere"):
        ops.block_attention(*operands, **static, backend="pallas")


GPU_CASES = {
    "empty": {"advertised": [0], "page_size": 32, "max_blocks": 8},
    "one token": {"advertised": [1], "page_size": 64, "max_blocks": 8, "layout": "page_major"},
    "full": {"advertised": [2048], "page_size": 32, "max_blocks": 64},
    "full, page_major": {"advertised": [4096, 4096], "page_size": 64, "max_blocks": 64, "layout": "page_major"},
    "ragged": {"advertised": [0, 1, 31, 32, 33, 63, 64, 65, 6000, 20000], "page_size": 32, "max_blocks": 640},
    "ragged, page_major": {
        "advertised": [30001, 7, 0, 64, 12345], "page_size": 64, "max_blocks": 480, "layout": "page_major",
    },
    "past the tables": {"advertised": [-3, 999], "page_size": 32, "max_blocks": 3},
    "holes": {
        "advertised": [700, 130, 64], "page_size": 32, "max_blocks": 30,
        "holes": [(0, 3, -1), (0, 4, 93), (0, 21, 2**31 - 1), (1, 0, -(2**31)), (2, 0, -1), (2, 1, -1)],
    },
    "holes in long contexts": {
        "advertised": [20003, 9000], "page_size": 32, "max_blocks": 640,
        "holes": [(0, column, -1) for column in (0, 1, 7, 8, 12, 201, 624, 625)] + [(1, column, 2**30) for column in (4, 281)],
    },
    "B=64": {"advertised": [37 * i for i in range(64)], "page_size": 32, "max_blocks": 80},
    "long": {"advertised": [65530], "page_size": 32, "max_blocks": 2056},
    "393K beside short ones": {"advertised": [393216, 100, 65536], "page_size": 32, "max_blocks": 12290},
    "all heads": {"advertised": [500, 90], "page_size": 32, "max_blocks": 20, "heads": 64, "block_size": 8},
    "other widths": {"advertised": [500, 90], "page_size": 128, "max_blocks": 5, "width": 320, "rank": 256, "heads": 3},
    "long block": {"advertised": [77], "page_size": 32, "max_blocks": 5, "block_size": 21, "heads": 5},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu_against_fp64(name):
    for seed in range(2 if max(GPU_CASES[name]["advertised"]) < 100_000 else 1):
        case = Attention.draw(**GPU_CASES[name], seed=seed)
        operands, static = case.arguments()
        for backend in ("pallas", "triton"):
            if why_unavailable(backend):  # jax-triton may not be installed
                continue
            call = jax.jit(lambda *operands, on=backend, static=static: ops.block_attention(*operands, **static, backend=on))
            output = call(*operands)
            case.check(output)
            assert compare(call(*operands), output), f"{backend}: a second run has other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
def test_a_step_on_a_gpu_takes_it(layout):
    geometry = Geometry(
        max_batch=5, max_draft_len=7, page_size=32, num_pages=64, max_blocks_per_seq=8, max_ctx=200, layout=layout
    )
    params = random_drafter(SMALL_K3, 0)
    target = ScriptedTarget(SMALL_K3, geometry, np.random.default_rng(0))
    inputs = target.step_inputs(np.zeros((3, 7), np.int32), [0, 1, geometry.dummy_slot])
    hidden = {}
    for backend in ("xla", "pallas"):
        step = make_decode_step(SMALL_K3, geometry, StepOptions(backend=backend, return_intermediates=True))
        assert step.explain(params, 3)["block_attention"] == backend
        state = init_state(SMALL_K3, geometry)
        state = dataclasses.replace(state, pool=state.pool + 0.5, ctx_len=jnp.array([30, 9, 0, 0, 0, 0], jnp.int32))
        outputs, _ = step(params, state, inputs)
        hidden[backend] = np.asarray(outputs.intermediates.block_hidden.astype(jnp.float32))
    assert np.abs(hidden["pallas"] - hidden["xla"]).max() <= 2.0**-5 * np.abs(hidden["xla"]).max()
