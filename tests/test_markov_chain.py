"""The Markov chain in one launch: its share of the vocabulary, its argmax, what it lowers to. Small cases of the launches per
slot are in test_kernels.py.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdspark import ops
from pallas_kernels import markov_chain as kernels
from pallas_kernels.row_argmax import part_start
from torch_bridge import compare

ON_GPU = jax.default_backend() == "gpu"
interpreted = pytest.mark.skipif(ON_GPU, reason="the interpreter; the GPU runs K3 shapes below")


def draw(B, K, vocab, rank, *, seed=0, exact=True):
    """Operands on integers, whose sums are exact, or normal; `w1` has rows that no draft asks for, anchors are hostile."""
    rng = np.random.default_rng(seed)

    def values(*shape):
        return (
            rng.choice(np.array([-3, -2, -1, 1, 2, 3], np.float32), shape) if exact else rng.standard_normal(shape, np.float32)
        )

    weights = [jnp.asarray(values(rows, rank), jnp.bfloat16) for rows in (vocab + 5, vocab)]
    return [values(B, K, vocab), rng.integers(-9, vocab + 9, B).astype(np.int32), *weights]


def check(operands, *, nan=False):
    """The definition's bits; with `nan`, where NaNs of different columns meet, only that the first of them is taken."""
    got = jax.jit(lambda *operands: ops.markov_chain(*operands, backend="pallas"))(*operands)
    # on the host: of an array on a GPU, numpy's argmax is the device's, which may answer any of several NaNs
    np.testing.assert_array_equal(
        got[1], np.argmax(np.asarray(got[0]), axis=-1), err_msg="not the argmax of the logits returned"
    )
    if not nan:
        for ours, wanted in zip(got, ops.markov_chain(*operands), strict=True):
            assert compare(ours, wanted)
    return got


def test_every_row_of_the_vocabulary_has_an_owner():
    for vocab in (64, 72, 128, 1000, 20472, 20480, 40960, 50688):
        for most in (1, 2, 78, 114, 132):
            rows = kernels.rows_per_program(vocab, most)
            programs = -(-vocab // rows)
            assert programs <= most
            assert programs == 1 or rows % kernels.TILE == 0
            starts = [int(part_start(jnp.int32(program), vocab, rows)) for program in range(programs)]
            assert (starts[0], starts[-1] + rows) == (0, vocab)
            assert all(0 < b - a <= rows for a, b in itertools.pairwise(starts))
            assert all(start % kernels.CORE == 0 for start in starts), "shared memory is copied in runs of 8 rows"


def test_which_operands_it_takes():
    def fits(B=8, vocab=20480, rank=256, dtype=jnp.bfloat16, programs=132):
        return kernels.fits_one_launch(B, jax.ShapeDtypeStruct((vocab, rank), dtype), programs)

    assert all((fits(), fits(B=1, vocab=64, rank=64, dtype=jnp.float16), fits(vocab=132 * 384)))
    assert not any((fits(B=9), fits(dtype=jnp.float32), fits(rank=96), fits(vocab=20479), fits(vocab=56), fits(programs=50)))
    assert not fits(vocab=132 * 384 + 8), "w2 is larger than the shared memory of all programs"


@pytest.mark.parametrize(("rank", "vocab"), [(64, 132 * 1536), (256, 132 * 384), (1536, 132 * 64)])
def test_what_it_takes_fits_into_shared_memory(monkeypatch, rank, vocab):
    """The most tokens of a rank, and one tile of rows per program more would be too many."""
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((8, 2, vocab), jnp.float32), ((8,), jnp.int32), ((99, rank), jnp.bfloat16), ((vocab, rank), jnp.bfloat16)
        )
    ]  # fmt: skip
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "multiprocessors", lambda: 132)
    assert kernels.fits_one_launch(8, operands[3], 132)
    lowered = jax.jit(kernels.markov_chain.__wrapped__).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1
    assert not kernels.fits_one_launch(8, jax.ShapeDtypeStruct((vocab + 8, rank), jnp.bfloat16), 132)


@interpreted
@pytest.mark.parametrize(
    ("B", "K", "vocab", "rank"),
    [
        (1, 3, 64, 64),
        (3, 2, 104, 64),
        pytest.param(2, 2, 72, 128, marks=pytest.mark.long),
        pytest.param(5, 2, 96, 64, marks=pytest.mark.long),
        pytest.param(8, 2, 72, 64, marks=pytest.mark.long),
    ],
)
def test_it_has_the_bits_of_the_definition(B, K, vocab, rank):
    operands = draw(B, K, vocab, rank)
    assert kernels.fits_one_launch(B, operands[3], 1)
    check(operands)


@interpreted
def test_ties_and_nans_go_to_the_first():
    base, anchor, w1, w2 = draw(2, 4, 80, 64)
    w2 = jnp.broadcast_to(w2[:1], w2.shape)  # one bias for all, so that the base logits decide
    base[0] = 2
    base[0, 3, [50, 70]] = 3
    base[:, 1, [71, 9, 33]] = np.array([-np.nan, np.nan, np.inf])
    base[1, 2] = -np.inf
    _, tokens = check([base, anchor, w1, w2], nan=True)
    assert tokens[0].tolist() == [0, 9, 0, 50]
    assert tokens[1, 1:3].tolist() == [9, 0]


def test_it_lowers_for_a_gpu_to_one_launch_with_one_semaphore(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "multiprocessors", lambda: 132)
    for B, vocab, rank, dtype in ((1, 20480, 256, jnp.bfloat16), (3, 1000, 64, jnp.float16), (8, 20472, 256, jnp.bfloat16)):
        shapes = (((B, 7, vocab), jnp.float32), ((B,), jnp.int32), ((vocab + 8, rank), dtype), ((vocab, rank), dtype))
        operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        text = jax.jit(kernels.markov_chain).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1
        zeros = re.findall(r"stablehlo.broadcast_in_dim %\w+, dims = \[\] : \(tensor<i32>\) -> (tensor<\w+>)", text)
        assert zeros == ["tensor<1xi32>"], "a semaphore of each program would wait for the others' for ever"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "K", "vocab"), [(1, 7, 20480), (4, 7, 20480), (8, 3, 20472), (3, 1, 1000), (2, 2, 64), (5, 2, 40960)]
)
def test_on_a_gpu(B, K, vocab):
    operands = draw(B, K, vocab, 256)
    assert kernels.fits_one_launch(B, operands[3], kernels.multiprocessors())
    for first, second in zip(check(operands), check(operands), strict=True):
        assert compare(first, second), "a second run has other bits"
    operands[0][:, 0, [vocab // 3, vocab // 2]] = np.nan
    assert list(check(operands, nan=True)[1][:, 0]) == [vocab // 3] * B
    check(draw(B, K, vocab, 256, exact=False), nan=True)
