from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .launch import Ref, launch, pieces, struct


@functools.partial(jax.jit, static_argnames=("block_size", "mask_token_id"))
def noise_block(
    embedding: jax.Array,
    bonus: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
    mask_row: jax.Array | None = None,
) -> jax.Array:
    """`[V, H]`, `[B]` -> `[B, block_size, H]`. One launch, one program per slot of the block, which copies one row."""
    num_gen, hidden = bonus.shape[0], embedding.shape[1]
    if num_gen == 0 or hidden == 0:
        return jnp.zeros((num_gen, block_size, hidden), embedding.dtype)
    masks = mask_operands(embedding, mask_row)

    def noise_block_kernel(embedding: Ref, bonus: Ref, *refs: Ref) -> None:
        *masks, block = refs
        b, j = lax.axis_index("request"), lax.axis_index("slot")
        write_noise_row(embedding, masks, block, b, j, bonus[b], mask_token_id)

    return launch(
        noise_block_kernel,
        out_type=struct((num_gen, block_size, hidden), embedding.dtype),
        grid={"slot": block_size, "request": num_gen},
    )(embedding, bonus, *masks)


def mask_operands(embedding: jax.Array, mask_row: jax.Array | None) -> tuple[jax.Array, ...]:
    """The trained mask row as a kernel's operand, if there is one."""
    return () if mask_row is None else (jnp.reshape(mask_row, embedding.shape[1]).astype(embedding.dtype),)


def write_noise_row(
    embedding: Ref,
    masks: Sequence[Ref],
    block: Ref,
    b: jax.Array,
    j: jax.Array,
    bonus: jax.Array,
    mask_token_id: int,
) -> None:
    """Copy the row of request b's slot j into the block."""
    vocab_size, hidden = embedding.shape
    anchor = jnp.clip(bonus, 0, vocab_size - 1)

    def copy(row: Ref) -> None:
        for piece in pieces(hidden, embedding.dtype, hidden):
            piece.store(block.at[b, j], piece.load(row))

    if masks:
        pl.when(j == 0)(lambda: copy(embedding.at[anchor]))
        pl.when(j > 0)(lambda: copy(masks[0]))
    else:
        copy(embedding.at[jnp.where(j == 0, anchor, mask_token_id)])
