from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .launch import Ref, launch, struct


@jax.jit
def next_tokens(accepted_tokens: jax.Array, num_accepted: jax.Array, draft_tokens: jax.Array) -> jax.Array:
    """`[rows, K+1]`, `[rows]`, `[B, K]` -> `[rows, K+1]`. One launch, one program per row; context rows come first."""
    rows, width = accepted_tokens.shape
    num_gen = draft_tokens.shape[0]
    num_contexts = rows - num_gen
    if rows == 0:
        return accepted_tokens
    drafts = (draft_tokens,) if draft_tokens.size else ()  # an empty operand has no address

    def next_tokens_kernel(accepted: Ref, num_accepted: Ref, *refs: Ref) -> None:
        *drafts, following = refs
        row = lax.axis_index("row")
        n = jnp.clip(num_accepted[row], 1, width)
        following[row, 0] = accepted[row, n - 1]
        for j in range(width - 1):
            token = drafts[0][jnp.maximum(row - num_contexts, 0), j] if drafts else jnp.int32(0)
            following[row, j + 1] = jnp.where(row < num_contexts, 0, token)

    return launch(next_tokens_kernel, out_type=struct((rows, width), jnp.int32), grid={"row": rows})(
        accepted_tokens, num_accepted, *drafts
    )
