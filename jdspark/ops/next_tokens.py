from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .safety import safe_num_accepted


def next_tokens(
    accepted_tokens: jax.Array, num_accepted: jax.Array, draft_tokens: jax.Array, *, backend: str = "xla"
) -> jax.Array:
    """What the target verifies next: each row's last accepted token, then its drafts.

    Args:
        accepted_tokens: `[rows, K+1]` int32, context rows first.
        num_accepted: `[rows]` int32, clipped to 1..K+1.
        draft_tokens: `[B, K]` int32, `B <= rows`: the gen rows'. Context rows get zero drafts.

    Returns:
        `[rows, K+1]` int32.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    num_contexts = contracts.next_tokens(accepted_tokens, num_accepted, draft_tokens)
    if backend != "xla":
        return kernel("next_tokens", backend)(accepted_tokens, num_accepted, draft_tokens)

    width = accepted_tokens.shape[1]
    n = safe_num_accepted(jnp.asarray(num_accepted), K=width - 1)
    last = jnp.take_along_axis(jnp.asarray(accepted_tokens), n[:, None] - 1, axis=1)
    drafts = jnp.concatenate([jnp.zeros((num_contexts, width - 1), jnp.int32), jnp.asarray(draft_tokens)])
    return jnp.concatenate([last, drafts], axis=1)
