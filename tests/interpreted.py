"""JAX's `triton` backend without a GPU: its launches run in Triton's interpreter, through a callback. fp32 only.

Then both launchers of a kernel run on a CPU, and the comparison of whole steps bit for bit can be tried there.
"""

import sys
import threading

import jax
import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from jdspark import paths, step
from jdspark.ops import backends
from torch_bridge import triton_kernels
from torch_bridge.triton_kernels.launching import launch_in_torch


def launch_in_jax(kernel, inputs, outputs, launch, *, in_place=None):
    def run(*arrays):
        ins = [torch.from_numpy(np.array(array)) for array in arrays]
        outs = [torch.full(out.shape, 7, dtype=getattr(torch, np.dtype(out.dtype).name)) for out in outputs]
        for source, destination in (in_place or {}).items():
            outs[destination] = ins[source]
        launch_in_torch(kernel, [*ins, *outs], launch)
        return [out.numpy() for out in outs]

    shapes = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outputs]
    return list(jax.pure_callback(run, shapes, *inputs))


@pytest.fixture
def interpreted_triton(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU: its own launches are compared")
    for name in triton_kernels.__all__:
        module = sys.modules.get(f"torch_bridge.triton_kernels.{name}")
        if hasattr(module, "launch_in_jax"):
            monkeypatch.setattr(module, "launch_in_jax", launch_in_jax)
    call, one_at_a_time = GridExecutor.__call__, threading.Lock()

    def locked(self, *args, **kwargs):  # the interpreter is not made for several threads, and JAX calls back from any
        with one_at_a_time:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
    available = backends.why_unavailable

    def why_unavailable(backend):
        return None if backend == "triton" else available(backend)

    for module in (backends, paths, step):
        monkeypatch.setattr(module, "why_unavailable", why_unavailable)
