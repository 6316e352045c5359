from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .safety import clip

if TYPE_CHECKING:
    import torch


@triton.jit
def next_tokens_kernel(  # type: ignore[no-untyped-def]
    accepted_tokens,  # [rows, K+1]
    num_accepted,  # [rows]
    draft_tokens,  # [B, K]
    upcoming,  # [rows, K+1] out
    NUM_CONTEXTS: tl.constexpr, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    DRAFT_ROW_STRIDE: tl.constexpr, DRAFT_STRIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row): the last accepted token, then the drafts; a context row's drafts are zeros."""
    row = tl.program_id(0)
    b = row - NUM_CONTEXTS
    n = clip(tl.load(num_accepted + row), 1, WIDTH)
    last = tl.load(accepted_tokens + row.to(tl.int64) * ROW_STRIDE + (n - 1) * TOKEN_STRIDE).to(tl.int32)
    j = tl.arange(0, LANES)
    drafted = (b >= 0) & (j >= 1) & (j < WIDTH)
    draft = tl.load(draft_tokens + b.to(tl.int64) * DRAFT_ROW_STRIDE + (j - 1) * DRAFT_STRIDE, mask=drafted, other=0)
    tl.store(upcoming + row.to(tl.int64) * WIDTH + j, tl.where(j == 0, last, draft.to(tl.int32)), mask=j < WIDTH)


def _launch(accepted_tokens: Any, draft_tokens: Any) -> Launch:
    rows, width = accepted_tokens.shape
    row_stride, token_stride = strides(accepted_tokens)
    draft_row_stride, draft_stride = strides(draft_tokens)
    constexprs = {
        "NUM_CONTEXTS": rows - draft_tokens.shape[0],
        "WIDTH": width,
        "ROW_STRIDE": row_stride,
        "TOKEN_STRIDE": token_stride,
        "DRAFT_ROW_STRIDE": draft_row_stride,
        "DRAFT_STRIDE": draft_stride,
        "LANES": power_of_2(width),
    }
    return Launch((rows,), constexprs, num_warps=1)


def next_tokens(accepted_tokens: torch.Tensor, num_accepted: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """What the target verifies next, `[rows, K+1]` int32, one launch; see `jdspark.ops.next_tokens`."""
    import torch

    contracts.next_tokens(accepted_tokens, num_accepted, draft_tokens)

    upcoming = torch.empty(accepted_tokens.shape, dtype=torch.int32, device=accepted_tokens.device)
    arrays = [accepted_tokens, num_accepted.contiguous(), draft_tokens, upcoming]
    launch_in_torch(next_tokens_kernel, arrays, _launch(accepted_tokens, draft_tokens))
    return upcoming


def next_tokens_in_jax(accepted_tokens: jax.Array, num_accepted: jax.Array, draft_tokens: jax.Array) -> jax.Array:
    """See `jdspark.ops.next_tokens`."""
    output = jax.ShapeDtypeStruct(accepted_tokens.shape, jnp.int32)
    if output.size == 0:
        return jnp.zeros(output.shape, jnp.int32)
    inputs = [jnp.asarray(operand) for operand in (accepted_tokens, num_accepted, draft_tokens)]
    return launch_in_jax(next_tokens_kernel, inputs, [output], _launch(accepted_tokens, draft_tokens))[0]
