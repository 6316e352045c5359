from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .latent_rows import PoolShape, move_rows, overwritten
from .launch import Ref, floor_div, floor_mod, launch, program, struct


@functools.partial(jax.jit, static_argnames=("layout",))
def scatter_context(
    pool: jax.Array,
    latents: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    *,
    layout: str = "layer_major",
) -> jax.Array:
    """The pool with `latents [N, L, D]` at `block_tables[rows, positions // P]`, in place if the pool is donated.

    Two launches of one program per token: the destinations, and the writes of all layers. Destinations are distinct by
    contract; a program of the second launch still looks through the later ones and leaves its place to them.
    """
    num_tokens = rows.shape[0]
    if num_tokens == 0 or pool.size == 0:
        return pool
    num_rows, max_blocks = block_tables.shape
    shape = PoolShape.of(pool, layout)

    def scatter_destinations_kernel(rows: Ref, positions: Ref, block_tables: Ref, destinations: Ref) -> None:
        i = lax.axis_index("token")
        row, position = rows[i], positions[i]
        column = floor_div(position, shape.page_size)
        inside = (row >= 0) & (row < num_rows) & (column >= 0) & (column < max_blocks)
        page = block_tables[jnp.where(inside, row, 0), jnp.where(inside, column, 0)]
        place = page * shape.page_size + floor_mod(position, shape.page_size)
        destinations[i] = jnp.where(inside & shape.holds(page), place, -1)

    def scatter_context_kernel(latents: Ref, destinations: Ref, pool: Ref) -> None:
        i = program("token", num_tokens)
        place = destinations[i]
        writes = (place >= 0) & ~overwritten(i, num_tokens, (destinations, place))
        place = jnp.maximum(place, 0)
        move_rows(
            pool,
            shape,
            tuple(range(shape.num_layers)),
            lambda layer: latents.at[i, layer],
            place // shape.page_size,
            place % shape.page_size,
            writes,
        )

    destinations = launch(scatter_destinations_kernel, out_type=struct((num_tokens,), jnp.int32), grid={"token": num_tokens})(
        rows, positions, block_tables
    )
    pool_ref = jax.new_ref(pool)
    launch(scatter_context_kernel, out_type=(), grid={"token": num_tokens})(latents, destinations, pool_ref)
    return jax.freeze(pool_ref)
