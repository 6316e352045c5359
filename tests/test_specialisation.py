"""One Triton source is one set of bits only if both launchers specialise it alike."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

ROOT = Path(__file__).parent.parent


def test_both_launchers_ask_for_the_same_code():
    """Signature, attributes, constexprs and options of every launch, from aligned and misaligned tensors, and the PTX."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "specialisation.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PTX equal") == 17
    assert "DIFFERENT" not in result.stdout


@pytest.mark.gpu
def test_both_caches_hold_the_same_ptx(monkeypatch):
    """What torch's and JAX's launcher really compiled on this GPU, and the results, bit for bit."""
    from torch_bridge import compare, to_torch, triton_kernels
    from torch_bridge.triton_kernels.launching import jax_triton

    from .specialisation import calls

    lib = jax_triton().triton_lib
    by_jax = set()
    compile_ptx = lib.compile_ttir_to_ptx_inplace

    def record(*args):
        result = compile_ptx(*args)
        by_jax.add(result.binary)
        return result

    monkeypatch.setattr(lib, "compile_ttir_to_ptx_inplace", record)
    lib._COMPILED_KERNEL_CACHE.clear()
    kernels = set()
    key = jax.random.key(0)
    for op, operands, static in calls():
        arrays = {}
        for name, (shape, kind) in operands.items():
            key, sub = jax.random.split(key)
            arrays[name] = jnp.full(shape, 33, kind) if kind == "int32" else jax.random.normal(sub, shape).astype(kind)
        module = sys.modules[f"torch_bridge.triton_kernels.{op}"]
        in_jax = jax.jit(
            lambda arrays, op=op, static=static, module=module: getattr(module, f"{op}_in_jax")(**arrays, **static)
        )
        ours = jax.tree.leaves(in_jax(arrays))
        in_torch = getattr(triton_kernels, op)(**{name: to_torch(a) for name, a in arrays.items()}, **static)
        for a, b in zip(ours, jax.tree.leaves(in_torch), strict=True):
            assert compare(a, b), op
        kernels |= {kernel for kernel in vars(module).values() if hasattr(kernel, "device_caches")}
    compiled = [c for kernel in kernels for c in kernel.device_caches[torch.cuda.current_device()][0].values()]
    by_torch = {c.asm["ptx"] for c in compiled}
    assert len(by_jax) >= 10
    assert by_jax <= by_torch
