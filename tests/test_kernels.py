"""Every kernel against the plain definition: Pallas in the GPU interpreter, Triton in its own (both compiled on a GPU).

By default one case of each shape, each of another family; `-m long` runs every family on every shape.
"""

import jax
import pytest

from jdspark.ops.backends import has_kernel
from torch_bridge import compare, largest_difference
from torch_bridge.cases import BOUNDED_OPS, EXACT_OPS, FAMILIES, SHAPES, draw_case, many_tokens
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


@pytest.mark.parametrize(("op", "backend"), BOUNDED)
def test_kernel_stays_within_its_bound(op, backend):
    check_bounded(op, backend, range(len(SHAPES)), seed=2)


@pytest.mark.long
@pytest.mark.parametrize(("op", "backend"), BOUNDED)
def test_kernel_stays_within_its_bound_in_every_family(op, backend):
    check_bounded(op, backend, range(len(SHAPES) * len(FAMILIES)), seed=3)


def test_every_exact_op_has_both_kernels():
    for op in EXACT_OPS:
        assert has_kernel(op, "pallas") or op in ("linear", "head_product"), op
        assert has_kernel(op, "triton"), op
