from __future__ import annotations

import functools
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np

from . import contracts
from .backends import kernel
from .row_argmax import row_argmax

FORCE_POOL_SIZE = 4096


@functools.cache
def force_pool() -> np.ndarray:
    """The `[4096]` float32 uniforms that decide a fractional `force`; both frameworks read this file."""
    return np.load(files("jdspark") / "force_uniforms.npy", allow_pickle=False)  # type: ignore[arg-type]


def split_force(force: float) -> tuple[int, float]:
    """`(int(force), fraction)` of a forced acceptance length."""
    return int(force), force - int(force)


def forced_num_accepted(force: float, force_counter: jax.Array | int, num_gen: int, K: int) -> jax.Array:
    """`[B]` int32 accepted counts of a forced step, `force_counter` being the counter after it went up."""
    whole, fraction = split_force(force)
    total = min(whole + 1, K + 1)
    extra = jnp.zeros(num_gen, jnp.int32)
    if fraction and total < K + 1:
        # the table has 2^12 entries, so int32 wrap-around and the sign do not change the index
        b = jnp.arange(num_gen, dtype=jnp.int32)
        index = (jnp.asarray(force_counter, jnp.int32) * 1000003 + b * 7919) & (FORCE_POOL_SIZE - 1)
        extra = (jnp.asarray(force_pool())[index] < np.float32(fraction)).astype(jnp.int32)
    return total + extra


def advances_force_counter(force: float, K: int) -> bool:
    """Whether a step with this `force` uses up a draw: only a fraction that still fits below K+1 does."""
    whole, fraction = split_force(force)
    return force > 0 and fraction > 0 and min(whole + 1, K + 1) < K + 1


def accept_strict(
    logits: jax.Array,
    draft_tokens: jax.Array,
    *,
    num_contexts: int = 0,
    force: float = 0.0,
    force_counter: jax.Array | int = 0,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Greedy acceptance: the target's argmax at every position, and how many drafts agree with it.

    The argmax follows torch: the lowest index among equals, and the first NaN is the maximum, also above +inf.

    Args:
        logits: `[num_contexts + B*(K+1), V]` float32, one row per context row first.
        draft_tokens: `[B, K]` int32; an id outside `[0, V)` matches nothing.
        num_contexts: static.
        force: measurements only. Overrides the gen rows' counts: `min(int(force) + 1, K + 1)` tokens, and one more with
            the fraction's probability, drawn from a fixed pool.
        force_counter: steps that drew from the pool so far; this one uses `force_counter + 1`.

    Returns:
        accepted_tokens: `[num_contexts + B, K+1]` int32; a context row holds its one token and zeros.
        num_accepted: `[num_contexts + B]` int32, 1 + the length of the matching prefix; context rows 1.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a negative `force`.
    """
    contracts.accept_strict(logits, draft_tokens, num_contexts, force)
    if backend != "xla":
        return kernel("accept_strict", backend)(
            logits, draft_tokens, num_contexts=num_contexts, force=force, force_counter=force_counter
        )

    num_gen, K = draft_tokens.shape
    target_tokens = row_argmax(jnp.asarray(logits))
    context_tokens = target_tokens[:num_contexts]
    gen_tokens = target_tokens[num_contexts:].reshape(num_gen, K + 1)
    matches = (jnp.asarray(draft_tokens) == gen_tokens[:, :K]).astype(jnp.int32)
    gen_accepted = 1 + jnp.sum(jnp.cumprod(matches, axis=1), axis=1, dtype=jnp.int32)
    if force > 0:
        gen_accepted = forced_num_accepted(force, jnp.asarray(force_counter, jnp.int32) + 1, num_gen, K)

    context_rows = jnp.zeros((num_contexts, K + 1), jnp.int32).at[:, 0].set(context_tokens)
    accepted_tokens = jnp.concatenate([context_rows, gen_tokens])
    num_accepted = jnp.concatenate([jnp.ones(num_contexts, jnp.int32), gen_accepted])
    return accepted_tokens, num_accepted
