"""A barrier over all programs of one launch, for kernels that stay on the GPU while their programs wait for each other."""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import Ref


def multiprocessors() -> int:
    """How many programs of a kernel any of this host's GPUs is sure to hold at once: one on each multiprocessor."""
    return min(int(device.core_count) for device in jax.local_devices())


def launch_semaphore() -> Ref:
    """The semaphore that all programs of a launch share, for the kernel's body; a scratch semaphore is each program's own.

    It is zero when the launch begins: XLA fills it by a small copy before the launch.
    """
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def grid_barrier(semaphore: Ref, number: jax.Array | int, programs: int) -> None:
    """Wait until every program of the launch is here; what each wrote to global memory before it is then visible to all.

    All programs must be on the GPU at once, or those that wait keep the others from starting and the GPU hangs: launch no
    more than `multiprocessors()` of them. For the same reason two such launches must not run on one GPU at the same time;
    nothing orders two that do not depend on each other.

    The interpreter has no semaphores: there a launch must have one program, and no barrier.

    Args:
        semaphore: `launch_semaphore()`, for this barrier alone.
        number: how many times the launch has passed this barrier before. The semaphore only rises, so that none can miss it.
        programs: of the whole launch, each one warpgroup.
    """
    plgpu.commit_smem()  # a signal comes from one thread: the writes of the others must lie before it
    plgpu.semaphore_signal(semaphore, memory_scope="gpu")
    plgpu.semaphore_wait(semaphore, (number + 1) * programs, decrement=False, memory_scope="gpu")
