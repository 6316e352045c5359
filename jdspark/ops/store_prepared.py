from __future__ import annotations

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .bits import keep_or_zero
from .checks import Layout
from .latent_pool import write_latents
from .safety import safe_num_accepted


def store_prepared(
    pool: jax.Array,
    latents: jax.Array,
    num_accepted: jax.Array,
    store_pages: jax.Array,
    store_offsets: jax.Array,
    *,
    layout: Layout = "layer_major",
    backend: str = "xla",
) -> jax.Array:
    """What `store_gen_context` writes, at the destinations that `prepare_step` found.

    Args:
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        latents: `[B*(K+1), L, D]` in the pool's dtype.
        num_accepted: `[B]` int32; rejected tokens write their product with zero.
        store_pages, store_offsets: `[B, K+1]` int32; a page outside the pool (-1) writes nothing.

    Returns:
        The pool. Writes act in (b, j) order, the last on a place wins.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    contracts.store_prepared(pool, latents, num_accepted, store_pages, store_offsets, layout)
    if backend != "xla":
        return kernel("store_prepared", backend)(pool, latents, num_accepted, store_pages, store_offsets, layout=layout)
    if store_pages.shape[0] == 0:
        return pool

    width = store_pages.shape[1]
    accepted = jnp.arange(width) < safe_num_accepted(num_accepted, K=width - 1)[:, None]
    values = keep_or_zero(accepted.reshape(-1, 1, 1), jnp.asarray(latents))
    return write_latents(pool, values, jnp.reshape(store_pages, -1), jnp.reshape(store_offsets, -1), layout)
