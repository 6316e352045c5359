import os

import jax
import pytest

# XLA's threads on a CPU: kernels of several warpgroups run in an interpreter, where each one that waits holds a thread
os.environ.setdefault("NPROC", "16")

if jax.default_backend() != "gpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports a Triton kernel

from jdspark import Geometry
from jdspark.presets import TINY, random_drafter


def pytest_collection_modifyitems(items):
    import torch

    if jax.default_backend() == "gpu" and torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU visible to both JAX and torch")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def compilations():
    """Grows by one for every XLA compilation while the test runs."""
    event_name, seen = "/jax/core/compile/backend_compile_duration", []

    def listen(event, _, **__):
        if event == event_name:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.clear_event_listeners()


@pytest.fixture(scope="session")
def params():
    """A tiny fp32 drafter with a random output head."""
    return random_drafter(TINY, 0, dtype="float32")


@pytest.fixture
def geometry():
    return Geometry(
        max_batch=4, max_draft_len=7, page_size=4, num_pages=48, max_blocks_per_seq=12, max_ctx=36, offset_divisor=2
    )
