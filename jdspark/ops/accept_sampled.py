from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .filtered_probabilities import filtered_probabilities
from .randomness import ACCEPT, TARGET, RowSampling, draw, gumbel_noise, token_keys
from .safety import safe_tokens


def accept_sampled(
    logits: jax.Array,
    draft_tokens: jax.Array,
    draft_probabilities: jax.Array,
    sampling: RowSampling,
    *,
    num_contexts: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Rejection acceptance: the accepted tokens are distributed as the target's own samples, whatever the drafter proposes.

    With p the target's filtered distribution at a position and q the one that its draft d was drawn from: d is accepted with
    probability `min(1, p(d) / q(d))`; in place of the first rejected one stands a token drawn from `max(p - q, 0)`,
    normalised; behind K accepted drafts one drawn from p (Leviathan et al. 2023, theorem 1; Chen et al. 2023). Exact up to
    float32: probabilities are rounded, and the acceptance draws are multiples of 2^-23.

    Args:
        logits: `[num_contexts + B*(K+1), V]` float32, one row per context row first.
        draft_tokens: `[B, K]` int32; an id outside `[0, V)` is rejected.
        draft_probabilities: `[B, K, V']` float32, `V' <= V`: the q of each draft, as `sampled_chain` returned it. For a draft
            that was not drawn but chosen, one at the draft and zero elsewhere.
        sampling: `[num_contexts + B]` each; `positions` is that of the first token the row decides. A greedy row
            (temperature 0) gets what `accept_strict` gives it, whatever its q.
        num_contexts: static.

    Returns:
        accepted_tokens: `[num_contexts + B, K+1]` int32: at every position its accepted draft or the token in its place, as
            if the drafts before it had all been accepted; a context row holds its one token, drawn from p, and zeros.
        num_accepted: `[num_contexts + B]` int32, 1 + the length of the accepted prefix; context rows 1.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.accept_sampled(logits, draft_tokens, draft_probabilities, sampling, num_contexts)
    draft_tokens = jnp.asarray(draft_tokens)
    num_gen, K = draft_tokens.shape
    vocab_size = logits.shape[1]
    gen = sampling.gen_rows(num_contexts).repeated(K + 1)
    context = RowSampling(*(jnp.asarray(field)[:num_contexts] for field in sampling))
    each = RowSampling(*(jnp.concatenate(fields) for fields in zip(context, gen, strict=True)))

    probabilities = filtered_probabilities(logits, each.temperature, each.top_k, each.top_p)
    p = probabilities[num_contexts:].reshape(num_gen, K + 1, vocab_size)
    drafts_p = p[:, :K]
    q = jnp.pad(jnp.asarray(draft_probabilities), ((0, 0), (0, 0), (0, vocab_size - draft_probabilities.shape[2])))

    inside = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    column = safe_tokens(draft_tokens, vocab_size)[..., None]
    p_of_draft, q_of_draft = (jnp.take_along_axis(x, column, axis=2)[..., 0] for x in (drafts_p, q))
    accept_keys = token_keys(gen.seeds, gen.positions, ACCEPT).reshape(num_gen, K + 1)[:, :K]
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(accept_keys)
    accepted = inside & (uniform * q_of_draft < p_of_draft)  # a draft that p excludes never passes: 0 < 0 is false

    residual = jnp.maximum(drafts_p - q, 0)
    # Rounding can leave nothing (that has a logarithm) of it where p and q are all but equal; then p will do.
    something = jnp.any(residual >= jnp.finfo(jnp.float32).tiny, axis=2, keepdims=True)
    residual = jnp.where(something, residual, drafts_p)
    in_place = jnp.concatenate([residual, p[:, K:]], axis=1).reshape(-1, vocab_size)
    weights = jnp.concatenate([probabilities[:num_contexts], in_place])
    drawn = draw(gumbel_noise(token_keys(each.seeds, each.positions, TARGET), vocab_size), weights)

    drawn_gen = drawn[num_contexts:].reshape(num_gen, K + 1)
    gen_tokens = jnp.concatenate([jnp.where(accepted, draft_tokens, drawn_gen[:, :K]), drawn_gen[:, K:]], axis=1)
    gen_accepted = 1 + jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    context_rows = jnp.zeros((num_contexts, K + 1), jnp.int32).at[:, 0].set(drawn[:num_contexts])
    num_accepted = jnp.concatenate([jnp.ones(num_contexts, jnp.int32), gen_accepted])
    return jnp.concatenate([context_rows, gen_tokens]), num_accepted
