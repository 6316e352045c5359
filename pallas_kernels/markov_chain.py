from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .launch import Ref, ceil_div, launch, pieces, struct
from .row_argmax import first_best, merged, order_keys, part_start, part_width


@jax.jit
def markov_chain(base_logits: jax.Array, anchor: jax.Array, w1: jax.Array, w2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[B, K, V]`, `[B]`, `[V1, r]`, `[V, r]` -> corrected_logits `[B, K, V]` float32, tokens `[B, K]`.

    Two launches per slot around XLA's product: the sum, with the winners of each row's parts; then their merge, which
    also fetches the next slot's row of `w1`.
    """
    num_gen, K, vocab_size = base_logits.shape
    base_logits = base_logits.astype(jnp.float32)
    if num_gen == 0 or K == 0:
        return base_logits, jnp.zeros((num_gen, K), jnp.int32)
    num_tokens, rank = w1.shape
    size = part_width(num_gen, vocab_size)
    num_parts = ceil_div(vocab_size, size)
    part_pieces = pieces(size, jnp.float32, vocab_size, size)
    rank_pieces = pieces(rank, w1.dtype, rank)

    def add_bias_kernel(base: Ref, bias: Ref, corrected: Ref, keys: Ref, indices: Ref, *, i: int) -> None:
        b, part = lax.axis_index("request"), lax.axis_index("part")
        start = part_start(part, vocab_size, size)
        found = []
        for piece in part_pieces:
            logits = piece.load(base.at[b, i], start) + piece.load(bias.at[b], start).astype(jnp.float32)
            piece.store(corrected.at[b, i], logits, start)
            found.append((order_keys(logits, piece), piece.positions() + start))
        keys[b, part], indices[b, part] = first_best(found)

    def next_row_kernel(keys: Ref, indices: Ref, w1: Ref, tokens: Ref, next_rows: Ref) -> None:
        b = lax.axis_index("request")
        token = merged(keys.at[b], indices.at[b], num_parts)
        tokens[b] = token
        for piece in rank_pieces:
            piece.store(next_rows.at[b], piece.load(w1.at[jnp.minimum(token, num_tokens - 1)]))

    corrected = jax.empty_ref(struct(base_logits.shape, jnp.float32))  # each launch fills one slot of it
    rows = w1[jnp.clip(anchor, 0, num_tokens - 1)]
    tokens = []
    for i in range(K):
        # the barrier keeps the product's rounding to the weights' dtype, as in the plain definition
        bias = lax.optimization_barrier(rows @ w2.T)
        keys, indices = launch(
            functools.partial(add_bias_kernel, i=i),
            out_type=(struct((num_gen, num_parts), jnp.int32), struct((num_gen, num_parts), jnp.int32)),
            grid={"request": num_gen, "part": num_parts},
        )(base_logits, bias, corrected)
        token, rows = launch(
            next_row_kernel,
            out_type=(struct((num_gen,), jnp.int32), struct((num_gen, rank), w1.dtype)),
            grid={"request": num_gen},
        )(keys, indices, w1)
        tokens.append(token)
    return jax.freeze(corrected), jnp.stack(tokens, axis=1)
