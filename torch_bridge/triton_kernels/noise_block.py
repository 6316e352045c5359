from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from jdspark.ops import contracts

from .latent_pool import as_bits
from .launching import Launch, launch_in_jax, launch_in_torch, power_of_2, strides
from .safety import clip

if TYPE_CHECKING:
    import torch


@triton.jit
def noise_block_kernel(  # type: ignore[no-untyped-def]
    embedding,  # [V, H]
    bonus,  # [B]
    mask_row,  # [H] if HAS_MASK_ROW, else anything
    block,  # [B, block_size, H] out
    ROW_STRIDE: tl.constexpr, HIDDEN_STRIDE: tl.constexpr, VOCAB: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MASK_TOKEN_ID: tl.constexpr, HAS_MASK_ROW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (b * block_size + slot, part): copy LANES numbers of one slot's row, as integers."""
    row = tl.program_id(0)
    h = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = h < HIDDEN
    if row % BLOCK_SIZE == 0:
        token = clip(tl.load(bonus + row // BLOCK_SIZE), 0, VOCAB - 1)
        bits = tl.load(as_bits(embedding) + token.to(tl.int64) * ROW_STRIDE + h * HIDDEN_STRIDE, mask=inside)
    elif HAS_MASK_ROW:
        bits = tl.load(as_bits(mask_row) + h, mask=inside)
    else:
        bits = tl.load(as_bits(embedding) + MASK_TOKEN_ID * ROW_STRIDE + h * HIDDEN_STRIDE, mask=inside)
    tl.store(as_bits(block) + row.to(tl.int64) * HIDDEN + h, bits, mask=inside)


def _launch(embedding: Any, num_gen: int, block_size: int, mask_token_id: int, has_mask_row: bool) -> Launch:
    vocab_size, hidden = embedding.shape
    row_stride, hidden_stride = strides(embedding)
    lanes = power_of_2(hidden, at_most=1024)
    constexprs = {
        "ROW_STRIDE": row_stride,
        "HIDDEN_STRIDE": hidden_stride,
        "VOCAB": vocab_size,
        "HIDDEN": hidden,
        "BLOCK_SIZE": block_size,
        "MASK_TOKEN_ID": mask_token_id,
        "HAS_MASK_ROW": has_mask_row,
        "LANES": lanes,
    }
    return Launch((num_gen * block_size, triton.cdiv(hidden, lanes)), constexprs)


def noise_block(
    embedding: torch.Tensor,
    bonus: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    mask_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """Embedded bonus token, then the mask row in every other slot, one launch; see `jdspark.ops.noise_block`."""
    contracts.noise_block(embedding, bonus, block_size, mask_token_id, mask_row)

    num_gen, hidden = bonus.shape[0], embedding.shape[1]
    block = embedding.new_empty((num_gen, block_size, hidden))
    mask = embedding if mask_row is None else mask_row.reshape(hidden).to(embedding.dtype).contiguous()
    launch = _launch(embedding, num_gen, block_size, mask_token_id, mask_row is not None)
    launch_in_torch(noise_block_kernel, [embedding, bonus.contiguous(), mask, block], launch)
    return block


def noise_block_in_jax(
    embedding: jax.Array,
    bonus: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
    mask_row: jax.Array | None = None,
) -> jax.Array:
    """See `jdspark.ops.noise_block`."""
    embedding, num_gen, hidden = jnp.asarray(embedding), bonus.shape[0], embedding.shape[1]
    output = jax.ShapeDtypeStruct((num_gen, block_size, hidden), embedding.dtype)
    if output.size == 0:
        return jnp.zeros(output.shape, output.dtype)
    mask = embedding if mask_row is None else jnp.reshape(mask_row, hidden).astype(embedding.dtype)
    launch = _launch(embedding, num_gen, block_size, mask_token_id, mask_row is not None)
    return launch_in_jax(noise_block_kernel, [embedding, jnp.asarray(bonus), mask], [output], launch)[0]
