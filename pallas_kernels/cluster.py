"""Programs of a launch that read each other's shared memory: a cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm

from .launch import Ref

RANK = "rank"
"""The axis of a launch along which its programs are clusters."""


def cluster_barrier() -> Any:
    """The scratch type of a barrier for one `meet`."""
    return plgpu.ClusterBarrier(collective_axes=(RANK,))


def meet(barrier: Ref) -> None:
    """Wait for one warpgroup of each program of the cluster: what these wrote ahead of it can be read behind it."""
    fence()
    plgpu.commit_smem()  # few threads arrive for all: the writes of the others must lie before it
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    fence()


def load_of(ref: Ref, member: int, layout: Any, size: int) -> jax.Array:
    """The fp32 values of a shared memory ref as one of the `size` programs of the cluster has them."""
    if size == 1:
        return plgpu.load(ref, layout=layout, optimized=False)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(ref.shape, jnp.float32, layout=layout))
    def load(context: mgpu.LaunchContext, ref: ir.Value) -> mgpu.FragmentedArray:
        del context
        of_member = utils.get_cluster_ref(ref, gpu.Dimension.x, utils.c(member, ir.IndexType.get()), generic=False)
        return mgpu.FragmentedArray.load_untiled(of_member, layout=layout.to_mgpu(), optimized=False)

    return load(ref)


def fence() -> None:
    """The barrier orders memory within a program only."""

    @plgpu.inline_mgpu()
    def fence_cluster(context: mgpu.LaunchContext) -> None:
        del context
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.cluster;", "", has_side_effects=True)

    fence_cluster()
