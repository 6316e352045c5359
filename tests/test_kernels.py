"""Every kernel against the plain definition: Pallas in the GPU interpreter, Triton in its own (both compiled on a GPU).

By default one case of each shape, each of another family; `-m long` runs every family on every shape.
"""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from jdspark.ops.backends import has_kernel
from torch_bridge import compare, largest_difference
from torch_bridge.bridge import to_numpy
from torch_bridge.cases import (
    BFLOAT16,
    BOUNDED_OPS,
    EXACT_OPS,
    FAMILIES,
    FLOAT32,
    SHAPES,
    BatchShape,
    Case,
    draw_batch,
    draw_case,
    many_tokens,
)
from torch_bridge.parity import available_backends, before_first_tie, has_op, run, untrusted

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
KERNELS = ["pallas", "torch triton"] + (["triton"] if DEVICE == "cuda" else [])
EXACT = [(op, backend) for op in EXACT_OPS for backend in KERNELS if has_op(op, backend)]


def check(op, backend, indices, seed):
    if reason := available_backends(DEVICE)[backend]:
        pytest.skip(reason)
    for index in indices:
        case = draw_case(op, index, seed)
        if untrusted(case, backend, DEVICE):
            continue
        for number, (a, b) in enumerate(zip(run(case, backend, DEVICE), run(case, "xla", DEVICE), strict=True)):
            comparison = compare(a, b)
            assert comparison, f"case {index} ({case.label}), output {number}: {comparison.detail}"


@pytest.mark.parametrize(("op", "backend"), EXACT)
def test_kernel_has_the_bits_of_the_definition(op, backend):
    check(op, backend, range(len(SHAPES)), seed=2)


@pytest.mark.long
@pytest.mark.parametrize(("op", "backend"), EXACT)
def test_kernel_has_the_bits_of_the_definition_in_every_family(op, backend):
    check(op, backend, range(len(SHAPES) * len(FAMILIES)), seed=3)


POOL_WRITERS = ["store_gen_context", "store_prepared", "scatter_context", "write_block_latents"]


SLOW = ("store_gen_context", "pallas")
"""A minute in the interpreter; `store_prepared` has the same loop over later tokens."""


@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(*pair, marks=[pytest.mark.long] * (pair == SLOW)) for pair in EXACT if pair[0] in POOL_WRITERS],
)
def test_kernel_with_many_tokens(op, backend):
    """More entries than are compared at once: a later write to the same place is found among all of them."""
    if reason := available_backends(DEVICE)[backend]:
        pytest.skip(reason)
    case = many_tokens(op, 5)
    (got,), (wanted,), (eager,) = (run(case, name, DEVICE) for name in (backend, "xla", "torch eager"))
    assert compare(got, wanted)
    assert compare(eager, wanted)


BOUNDED = [(op, backend) for op in BOUNDED_OPS for backend in KERNELS if has_op(op, backend)]
BOUNDED.remove(("block_attention", "pallas"))  # takes other shapes than these: test_block_attention.py


def check_bounded(op, backend, indices, seed):
    if reason := available_backends(DEVICE)[backend]:
        pytest.skip(reason)
    compared = 0
    for index in indices:
        case = draw_case(op, index, seed, bounded=True)
        if untrusted(case, backend, DEVICE):
            continue
        left, right = run(case, backend, DEVICE), run(case, "xla", DEVICE)
        if op == "markov_chain":
            left, right = before_first_tie(left, right)
        for ours, theirs in zip(left, right, strict=True):
            assert largest_difference(ours, theirs) <= case.bound, f"case {index} ({case.label})"
        compared += 1
    assert compared >= len(indices) / 2


SLOW_BOUNDED = ("norm_rope_store", "pallas")
"""Half a minute in the interpreter; its bits are compared below."""

SLOW_SHAPES = {("norm_rope", "pallas"): (6,)}
"""As long in the interpreter as all others; in the run of every family."""


@pytest.mark.parametrize(
    ("op", "backend"), [pytest.param(*pair, marks=[pytest.mark.long] * (pair == SLOW_BOUNDED)) for pair in BOUNDED]
)
def test_kernel_stays_within_its_bound(op, backend):
    slow = SLOW_SHAPES.get((op, backend), ())
    check_bounded(op, backend, [index for index in range(len(SHAPES)) if index not in slow], seed=2)


@pytest.mark.long
@pytest.mark.parametrize(("op", "backend"), BOUNDED)
def test_kernel_stays_within_its_bound_in_every_family(op, backend):
    check_bounded(op, backend, range(len(SHAPES) * len(FAMILIES)), seed=3)


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("backend", KERNELS)
def test_norm_rope_in_the_store_has_the_bits_of_the_two_kernels(backend, layout):
    """NaN, infinities and signed zeros among the latents, tokens that lose their place or have none, a nonzero pool."""
    if reason := available_backends(DEVICE)[backend]:
        pytest.skip(reason)
    shape = BatchShape(3, 1, 2, 4, 5, 0, layout, BFLOAT16 if backend == "pallas" else FLOAT32, L=2, D=192, num_pages=4)
    rng = np.random.default_rng(4)
    operands, static = BOUNDED_OPS["norm_rope_store"](rng, draw_batch(rng, shape, "plain"))
    latents = operands["latents"]
    latents[0, 0, 3], latents[1, 1, [130, 131]], latents[2, 0, 150] = np.nan, [np.inf, -0.0], -np.inf
    latents[3, 1, :] = -0.0
    operands |= {"num_accepted": np.array([1, 2, 1], np.int32), "positions": np.array([0, 5, -1, 99, 7, 3], np.int32)}
    operands |= {"store_pages": np.array([[1, 1], [-1, 0], [3, 0]], np.int32)}
    operands |= {"store_offsets": np.array([[2, 0], [1, 3], [1, 3]], np.int32)}
    static |= {"return_latents": True}
    case = Case("norm_rope_store", layout, operands, static, shape.dtype.name)
    pool, returned = run(case, backend, DEVICE)
    floats = ("latents", "positions", "kv_a_norm", "cos", "sin")
    alone = Case("norm_rope", "", {name: operands[name] for name in floats}, {"eps": static["eps"]}, case.dtype)
    (normed,) = run(alone, backend, DEVICE)
    assert compare(returned, normed)
    stored = {name: operands[name] for name in ("pool", "num_accepted", "store_pages", "store_offsets")}
    stored["latents"] = to_numpy(normed)
    (wanted,) = run(Case("store_prepared", "", stored, {"layout": layout}, case.dtype), "xla", DEVICE)
    assert compare(pool, wanted)
    assert np.isnan(to_numpy(pool)).any()
    changed = (to_numpy(wanted) != operands["pool"]).any(axis=-1)
    assert changed.sum() == 4 * shape.L, "six tokens, one without a page and one that a later token overwrites"


def test_every_exact_op_has_both_kernels():
    for op in EXACT_OPS:
        assert has_kernel(op, "pallas") or op in ("linear", "head_product"), op
        assert has_kernel(op, "triton"), op


def test_every_mutant_changes_something():
    """The list of `scripts/mutants.py` names places in the kernels; a place that is gone would end the run."""
    mutants = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "mutants.py"))
    all_of_them = (*mutants["MUTANTS"], *mutants["ON_A_GPU"])
    gone = [f"{mutant.file}: {mutant.old}" for mutant in all_of_them if not mutant.applies()]
    assert not gone
