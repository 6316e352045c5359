"""DLPack facts that show on a CPU, and what the bridge makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge import BridgeError, bitwise_equal, compare, donating, largest_difference, shares_memory, to_jax, to_torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "float16", "uint8"])
def test_round_trip_shares_memory(dtype):
    array = jnp.asarray(np.arange(64).reshape(8, 8) % 2, dtype)
    tensor = to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert shares_memory(array, tensor)
    back = to_jax(tensor)
    assert shares_memory(back, tensor)
    assert bitwise_equal(back, array)
    assert not shares_memory(array, to_torch(array, copy=True))
    assert not shares_memory(to_jax(tensor, copy=True), tensor)


def test_writing_through_one_shows_in_the_other():
    """Why the bridge never writes into a JAX array, and why nobody should."""
    array = jnp.zeros(64, jnp.float32)
    to_torch(array)[3] = 7
    assert array[3] == 7


def test_a_donated_array_is_refused():
    array = jnp.zeros(64)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    with pytest.raises(BridgeError, match="donated or deleted"):
        to_torch(array)


def test_donating_a_viewed_array_keeps_the_view_valid_on_a_cpu():
    """A CPU copies in silence; a GPU refuses, which `donating` explains (below)."""
    array = jnp.arange(64, dtype=jnp.float32)
    view = to_torch(array)
    result = donating(jax.jit(lambda x: x.at[0].set(99), donate_argnums=0), array)
    assert result[0] == 99
    assert view[0] == 0
    assert not shares_memory(result, view)


def test_donation_failure_is_explained():
    def gpu_like(_):
        raise RuntimeError("INVALID_ARGUMENT: Donation requested for buffer with external reference")

    with pytest.raises(BridgeError, match=r"still viewed by a torch tensor.*to_torch\(array, copy=True\)"):
        donating(gpu_like, None)

    def other(_):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        donating(other, None)


def test_int64_is_range_checked():
    assert not jax.config.read("jax_enable_x64")
    tensor = torch.tensor([1, -(2**31), 2**31 - 1])
    array = to_jax(tensor)
    assert array.dtype == jnp.int32
    assert bitwise_equal(array, tensor)  # by value
    with pytest.raises(BridgeError, match=r"\[1, 2147483648\], which int32 cannot hold"):
        to_jax(torch.tensor([1, 2**31]))
    with pytest.raises(BridgeError, match="int64 became int32"):
        to_jax(tensor, copy=False)
    with pytest.raises(BridgeError, match=r"narrow torch\.float64 in silence"):
        to_jax(torch.zeros(2, dtype=torch.float64))
    for dtype in (torch.uint64, torch.complex128):
        with pytest.raises(BridgeError, match="in silence"):
            to_jax(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("view", [lambda t: t[:, ::2], lambda t: t.T, lambda t: t[:, :3], lambda t: t[::2]])
def test_strided_tensors_are_laid_out_first(view):
    tensor = view(torch.arange(64, dtype=torch.float32).reshape(8, 8))
    assert not tensor.is_contiguous()
    array = to_jax(tensor)
    assert bitwise_equal(array, tensor)
    assert not shares_memory(array, tensor)
    with pytest.raises(BridgeError, match="the tensor is strided"):
        to_jax(tensor, copy=False)


def test_a_misaligned_buffer_is_reported():
    tensor = torch.arange(65, dtype=torch.float32)[1:]
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 16
    array = to_jax(tensor)
    assert bitwise_equal(array, tensor)
    assert not shares_memory(array, tensor)
    with pytest.raises(BridgeError, match="not aligned"):
        to_jax(tensor, copy=False)


def test_wrong_kinds_are_refused():
    with pytest.raises(BridgeError, match=r"to_torch: got a ndarray, expected a concrete jax\.Array"):
        to_torch(np.zeros(3))
    with pytest.raises(BridgeError, match=r"to_jax: got a ndarray, expected a torch\.Tensor"):
        to_jax(np.zeros(3))
    with pytest.raises(BridgeError, match="expected a concrete"):
        jax.jit(lambda x: to_torch(x))(jnp.zeros(3))


def test_negative_and_conjugate_views_keep_their_sign():
    view = torch.tensor([1 + 1j] * 64).conj().imag
    assert view.is_neg()
    assert to_jax(view)[0] == -1
    assert compare(view, np.full(64, -1, np.float32))
    with pytest.raises(BridgeError, match="conjugate or negative view"):
        to_jax(view, copy=False)
    assert to_jax(torch.tensor([1 + 1j] * 64).conj())[0] == 1 - 1j


def test_gradients_are_left_behind():
    tensor = torch.ones(16, requires_grad=True)
    assert bitwise_equal(to_jax(tensor), torch.ones(16))


def test_empty_arrays_pass():
    assert to_torch(jnp.zeros((0, 3))).shape == (0, 3)
    assert to_jax(torch.zeros(0, 3)).shape == (0, 3)
    assert bitwise_equal(jnp.zeros((0, 3)), torch.zeros(0, 3))


def test_comparison_is_by_bits():
    a = jnp.array([0.0, 1.0, jnp.nan, jnp.inf])
    assert compare(a, to_torch(a))
    assert not compare(a, torch.tensor([-0.0, 1.0, torch.nan, torch.inf]))
    comparison = compare(a, torch.tensor([0.0, 1.0 + 2**-23, torch.nan, -torch.inf]))
    assert (comparison.equal, comparison.mismatches, comparison.where) == (False, 2, (1,))
    payload = np.array([0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
    assert compare(payload, jnp.array([jnp.nan, jnp.nan]))  # NaNs compare as NaNs
    assert not compare(payload, jnp.array([jnp.nan, 0.0]))
    tiny = torch.tensor([1e-40], dtype=torch.bfloat16)
    assert not compare(tiny, torch.zeros(1, dtype=torch.bfloat16))


def test_comparison_of_kinds_and_shapes():
    assert compare(jnp.array([1, 2]), torch.tensor([1, 2]))
    assert not compare(jnp.array([1, 2]), torch.tensor([1.0, 2.0]))
    assert not compare(jnp.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert not compare(jnp.ones(2), torch.ones(1))
    assert "shape [2] against [1]" in compare(jnp.ones(2), torch.ones(1)).detail
    assert compare(jnp.array(True), torch.tensor(True))
    assert compare(jnp.float32(1), torch.tensor(1.0))
    assert not compare(jnp.float32(1), torch.tensor(2.0))
    assert compare(jnp.float32(1), torch.tensor(2.0)).where == ()


def test_tuples_compare_element_by_element():
    a, b = jnp.ones(2), jnp.zeros(3, jnp.int32)
    assert bitwise_equal((a, b), (torch.ones(2), torch.zeros(3, dtype=torch.int64)))
    assert not bitwise_equal((a, b), (torch.ones(2),))
    assert not bitwise_equal((a,), a)
    assert not bitwise_equal((a, b), (torch.ones(2), torch.ones(3, dtype=torch.int64)))


def test_pytrees_compare_leaf_by_leaf():
    a = {"x": jnp.ones(2), "y": [jnp.zeros(1), jnp.zeros((2, 3))]}
    assert bitwise_equal(a, jax.tree.map(to_torch, a))
    assert not bitwise_equal(a, a | {"x": jnp.zeros(2)})
    assert not bitwise_equal(a, {"x": jnp.ones(2)})


def test_largest_difference():
    assert largest_difference(torch.tensor([1.0, 2.0]), jnp.array([1.0, 4.0])) == 0.5
    assert largest_difference(jnp.array([jnp.nan, 1.0]), torch.tensor([torch.nan, 1.0])) == 0
    assert largest_difference(jnp.array([jnp.nan, 1.0]), torch.tensor([0.0, 1.0])) == float("inf")
    assert largest_difference(jnp.array([jnp.inf]), torch.tensor([-torch.inf])) == float("inf")
    assert largest_difference(jnp.zeros(0), torch.zeros(0)) == 0
