from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .checks import Array
from .safety import safe_num_accepted, safe_slots


class Prologue(NamedTuple):
    """What a decode step knows about its gen requests before it touches the cache; all int32."""

    bonus: Array
    """`[B]`: the last accepted token, the block's anchor."""
    query_positions: Array
    """`[B, block_size]`: sequence positions of the block."""
    context_positions: Array
    """`[B, K+1]`: sequence positions of the verified tokens."""
    embedding_ids: Array
    """`[B+1]`: the bonus tokens, then the mask token."""


def gen_prologue(
    accepted_tokens: jax.Array,
    num_accepted: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    *,
    block_size: int,
    max_ctx: int,
    mask_token_id: int,
    backend: str = "xla",
) -> Prologue:
    """Pick the bonus token and build the positions of the block and of the tokens just verified.

    With `n = num_accepted[b]` and `c = ctx_len[slots[b]]`: the bonus is `accepted_tokens[b, n-1]`, the block starts at
    `min(c + n, max_ctx)` and the verified tokens sit at `c .. c + K` (not clamped).

    Args:
        accepted_tokens: `[B, K+1]` int32, gen rows only.
        num_accepted: `[B]` int32, clipped to 1..K+1.
        ctx_len: `[max_batch + 1]` int32, before this step's advance.
        slots: `[B]` int32; outside `[0, max_batch]` counts as the dummy, the last row of `ctx_len`.
        block_size, max_ctx, mask_token_id: static.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a static number out of range.
    """
    contracts.gen_prologue(accepted_tokens, num_accepted, ctx_len, slots, block_size, max_ctx, mask_token_id)
    if backend != "xla":
        return kernel("gen_prologue", backend)(
            accepted_tokens, num_accepted, ctx_len, slots,
            block_size=block_size, max_ctx=max_ctx, mask_token_id=mask_token_id,
        )  # fmt: skip

    width = accepted_tokens.shape[1]
    accepted_tokens, ctx_len = jnp.asarray(accepted_tokens), jnp.asarray(ctx_len)
    n = safe_num_accepted(num_accepted, K=width - 1)
    c = ctx_len[safe_slots(slots, ctx_len)]
    bonus = jnp.take_along_axis(accepted_tokens, n[:, None] - 1, axis=1)[:, 0]
    # min(c, max_ctx) first: the same number, and c + n cannot overflow
    block_start = jnp.minimum(jnp.minimum(c, max_ctx) + n, max_ctx)
    return Prologue(
        bonus=bonus,
        query_positions=block_start[:, None] + jnp.arange(block_size, dtype=jnp.int32),
        context_positions=c[:, None] + jnp.arange(width, dtype=jnp.int32),
        embedding_ids=jnp.append(bonus, jnp.int32(mask_token_id)),
    )
