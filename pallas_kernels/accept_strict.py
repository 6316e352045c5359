from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jdspark.ops.accept_strict import forced_num_accepted

from .launch import Ref, ceil_div, launch, pieces, struct
from .row_argmax import first_best, merged, order_keys, part_start, part_width


@functools.partial(jax.jit, static_argnames=("num_contexts", "force"))
def accept_strict(
    logits: jax.Array,
    draft_tokens: jax.Array,
    *,
    num_contexts: int = 0,
    force: float = 0.0,
    force_counter: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """`[num_contexts + B*(K+1), V]`, `[B, K]` -> accepted_tokens `[num_contexts + B, K+1]`, num_accepted.

    Two launches: the winners of each row's parts, one program per row and part; then, one program per request, the
    merge and the matching prefix. `force`, for measurements, replaces the counts by plain XLA.
    """
    num_gen, K = draft_tokens.shape
    num_rows, vocab_size = logits.shape
    num_requests = num_contexts + num_gen
    if num_requests == 0:
        return jnp.zeros((0, K + 1), jnp.int32), jnp.zeros(0, jnp.int32)
    size = part_width(num_rows, vocab_size)
    num_parts = ceil_div(vocab_size, size)
    part_pieces = pieces(size, logits.dtype, vocab_size, size)
    drafts = (draft_tokens,) if draft_tokens.size else ()  # an empty operand has no address

    def argmax_parts_kernel(logits: Ref, keys: Ref, indices: Ref) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        start = part_start(part, vocab_size, size)
        found = [(order_keys(piece.load(logits.at[row], start), piece), piece.positions() + start) for piece in part_pieces]
        keys[row, part], indices[row, part] = first_best(found)

    def accept_kernel(keys: Ref, indices: Ref, *refs: Ref) -> None:
        *drafts, accepted_tokens, num_accepted = refs
        request = lax.axis_index("request")

        @pl.when(request < num_contexts)
        def _context() -> None:
            accepted_tokens[request, 0] = merged(keys.at[request], indices.at[request], num_parts)
            for j in range(1, K + 1):
                accepted_tokens[request, j] = jnp.int32(0)
            num_accepted[request] = jnp.int32(1)

        @pl.when(request >= num_contexts)
        def _gen() -> None:
            b = jnp.maximum(request - num_contexts, 0)
            first = num_contexts + b * (K + 1)
            tokens = [merged(keys.at[first + j], indices.at[first + j], num_parts) for j in range(K + 1)]
            n, matches = jnp.int32(1), jnp.int32(1)
            for j in range(K + 1):
                accepted_tokens[request, j] = tokens[j]
                if j < K and drafts:
                    matches = jnp.where(drafts[0][b, j] == tokens[j], matches, 0)
                    n += matches
            num_accepted[request] = n

    keys, indices = launch(
        argmax_parts_kernel,
        out_type=(struct((num_rows, num_parts), jnp.int32), struct((num_rows, num_parts), jnp.int32)),
        grid={"row": num_rows, "part": num_parts},
    )(logits)
    accepted_tokens, num_accepted = launch(
        accept_kernel,
        out_type=(struct((num_requests, K + 1), jnp.int32), struct((num_requests,), jnp.int32)),
        grid={"request": num_requests},
    )(keys, indices, *drafts)
    if force > 0:
        forced = forced_num_accepted(force, jnp.asarray(force_counter, jnp.int32) + 1, num_gen, K)
        num_accepted = num_accepted.at[num_contexts:].set(forced)
    return accepted_tokens, num_accepted
