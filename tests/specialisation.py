"""What each launcher asks Triton to compile, without a GPU: launches are recorded instead of run.

`python tests/specialisation.py` compares the two and the PTX compiled from them; run it without TRITON_INTERPRET. Attributes
are worked out as torch's launcher (`triton.runtime.jit`) and jax-triton 0.3.1 do: from a tensor's address and dtype in torch,
from an address that is a multiple of 16 in JAX.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from torch_bridge import triton_kernels
from torch_bridge.triton_kernels import launching

HOPPER = GPUTarget("cuda", 90, 32)
JAX_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}


class Compilation(NamedTuple):
    """Everything that the generated code depends on."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[int, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]

    def compile(self) -> Any:
        backend = CUDABackend(HOPPER)
        names = self.kernel.arg_names
        attributes = {(i,): backend.parse_attr(text) for i, text in self.attributes}
        source = ASTSource(self.kernel, dict(self.signature), {(names.index(n),): v for n, v in self.constexprs}, attributes)
        return triton.compile(source, target=HOPPER, options=dict(self.options))


def compilation(kernel: Any, arrays: list[Any], constexprs: dict[str, Any], options: dict[str, Any], grid: Any) -> Compilation:
    """`arrays` as Triton's specialiser takes them: torch tensors, or jax-triton's stand-ins."""
    backend = CUDABackend(HOPPER)
    found = [native_specialize_impl(backend, array, False, True, True) for array in arrays]
    signature = {name: kind for name, (kind, _) in zip(kernel.arg_names, found)}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return Compilation(
        kernel,
        tuple(sorted(signature.items())),
        tuple((i, text) for i, (_, text) in enumerate(found) if text),
        tuple(sorted(constexprs.items())),
        tuple(sorted(options.items())),
        tuple(grid),
    )


OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def launched_by_torch(call: Any) -> list[Compilation]:
    seen: list[Compilation] = []

    def record(self: Any, *arrays: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS}
        seen.append(compilation(self, list(arrays), named, options, grid))

    original = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = record
    try:
        call()
    finally:
        triton.runtime.jit.JITFunction.run = original
    return seen


def launched_by_jax(call: Any) -> list[Compilation]:
    seen: list[Compilation] = []

    def triton_call(*inputs: Any, kernel: Any, out_shape: Any, grid: Any, input_output_aliases: Any, **named: Any) -> Any:
        options = {name: named.pop(name) for name in OPTIONS}
        kinds = [JAX_TYPES[x.dtype.name] for x in (*inputs, *out_shape)]
        arrays = [types.SimpleNamespace(data_ptr=lambda: 16, dtype=kind) for kind in kinds]
        seen.append(compilation(kernel, arrays, named, options, grid))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    original = launching.jax_triton
    launching.jax_triton = lambda: types.SimpleNamespace(triton_call=triton_call)
    try:
        call()
    finally:
        launching.jax_triton = original
    return seen


def calls() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Op, operands (name -> shape and dtype) and static arguments: every op that computes, odd sizes among them."""
    dtype, i32, f32 = "bfloat16", "int32", "float32"
    residual = {"x": ((7, 1024), dtype), "weight": ((7168, 1024), dtype), "residual": ((7, 7168), dtype)}
    return [
        ("linear", {"x": ((2, 7, 3584), dtype), "weight": ((576, 3584), dtype)}, {}),
        ("linear", residual, {}),
        ("head_product", {"x": ((1, 7, 8, 128), dtype), "weight": ((8, 128, 512), dtype)}, {}),
        ("head_product", {"x": ((1, 7, 8, 512), dtype), "weight": ((8, 128, 512), dtype)}, {"transposed": True}),
        ("rms_norm", {"x": ((7, 7168), dtype), "weight": ((7168,), dtype)}, {"eps": 1e-5}),
        ("rope", {"x": ((1, 7, 8, 64), dtype), "cos": ((1, 7, 1, 32), f32), "sin": ((1, 7, 1, 32), f32)}, {}),
        ("swiglu", {"gate": ((7, 1792), dtype), "up": ((7, 1792), dtype)}, {}),
        (
            "norm_rope",
            {"latents": ((8, 5, 576), dtype), "positions": ((8,), i32), "kv_a_norm": ((5, 512), dtype), "cos": ((99, 32), f32),
             "sin": ((99, 32), f32)},
            {"eps": 1e-5},
        ),
        (
            "block_attention",
            {"query": ((1, 7, 8, 576), dtype), "block_latents": ((1, 7, 576), dtype), "pool": ((5, 40, 32, 576), dtype),
             "page_tables": ((1, 72), i32), "advertised": ((1,), i32)},
            {"layer": 3, "scale": 0.1, "kv_lora_rank": 512},
        ),
        (
            "markov_chain",
            {"base_logits": ((1, 2, 2048), f32), "anchor": ((1,), i32), "w1": ((4096, 256), dtype), "w2": ((2048, 256), dtype)},
            {},
        ),
    ]  # fmt: skip


def launched(
    op: str, operands: dict[str, Any], static: dict[str, Any], *, misaligned: bool
) -> tuple[list[Compilation], list[Compilation]]:
    """What torch and what JAX compile for one call; `misaligned` gives torch tensors that begin 4 bytes off, or 2."""

    def tensor(shape: tuple[int, ...], kind: str) -> torch.Tensor:
        size = int(np.prod(shape))
        flat = torch.zeros(size + 8, dtype=getattr(torch, kind))
        start = 1 if misaligned else 0
        return flat[start : start + size].view(shape)

    torch_operands = {name: tensor(*spec) for name, spec in operands.items()}
    jax_operands = {name: jnp.zeros(shape, kind) for name, (shape, kind) in operands.items()}
    module = __import__(f"torch_bridge.triton_kernels.{op}", fromlist=["_"])
    return (
        launched_by_torch(lambda: getattr(triton_kernels, op)(**torch_operands, **static)),
        launched_by_jax(lambda: getattr(module, f"{op}_in_jax")(**jax_operands, **static)),
    )


def main() -> int:
    """Prints a line per compiled kernel; exit status 1 if the launchers or their PTX differ."""
    jax.config.update("jax_platforms", "cpu")
    failed = False
    for op, operands, static in calls():
        for misaligned in (False, True):
            by_torch, by_jax = launched(op, operands, static, misaligned=misaligned)
            alike = len(by_torch) > 0 and by_torch == by_jax
            failed |= not alike
            if not alike:
                print(f"DIFFERENT {op} misaligned={misaligned}: {by_torch} {by_jax}")
        for ours, theirs in zip(by_torch, by_jax, strict=True):
            ptx = [one.compile().asm["ptx"] for one in (ours, theirs)]
            failed |= ptx[0] != ptx[1]
            print(f"{op}: {ours.kernel.__name__}, grid {ours.grid}, PTX {'equal' if ptx[0] == ptx[1] else 'DIFFERENT'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
