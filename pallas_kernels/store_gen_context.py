from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .gen_prologue import slot_of
from .latent_rows import PoolShape, move_rows
from .launch import Ref, ceil_div, launch, program

UNROLLED = 16
"""Requests whose loads a program has in flight at once while it looks for a later write to its place."""


@dataclasses.dataclass(frozen=True)
class Destinations:
    """Where the tokens of each request go; every method works on scalars inside a kernel."""

    ctx_len: Ref
    slots: Ref
    block_tables: Ref
    block_counts: Ref
    page_size: int
    first_row: int
    K: int

    def columns(self, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first token's position before it is clamped from below, and the last position of the request's pages (-1
        if it owns none)."""
        count = jnp.clip(self.block_counts[self.first_row + b], 0, self.block_tables.shape[1])
        last = count * self.page_size - 1
        # min(c, last) first: the same numbers, and c + j cannot overflow
        return jnp.minimum(self.ctx_len[slot_of(self.slots, b, self.ctx_len.shape[0])], last), last

    def page(self, b: jax.Array, column: jax.Array) -> jax.Array:
        return self.block_tables[self.first_row + b, column]

    def later_write(self, b: jax.Array, j: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
        """Whether an entry after (b, j) goes to (page, offset).

        A request's tokens lie at consecutive positions, so few of them can: one for each page that K+1 positions touch.
        """
        num_gen, max_blocks = self.slots.shape[0], self.block_tables.shape[1]
        pages_touched = (self.K + self.page_size - 1) // self.page_size + 1

        def from_requests(chunk: jax.Array, hit: jax.Array) -> jax.Array:
            # stage by stage, so that the loads of a stage are under way together
            others = [chunk * UNROLLED + u for u in range(min(UNROLLED, num_gen))]
            rows = [jnp.minimum(other, num_gen - 1) for other in others]
            columns = [self.columns(row) for row in rows]
            reached = []
            for other, row, (start, last) in zip(others, rows, columns):
                follows = (other < num_gen) & ((other > b) | ((other == b) & (j < self.K))) & (last >= 0)
                low = jnp.maximum(jnp.minimum(start + jnp.where(other == b, j + 1, 0), last), 0)
                high = jnp.maximum(jnp.minimum(start + self.K, last), 0)
                for nth in range(pages_touched):
                    column = low // self.page_size + nth
                    position = column * self.page_size + offset
                    inside = follows & (position >= low) & (position <= high)
                    reached.append((inside, self.page(row, jnp.minimum(column, max_blocks - 1))))
            for inside, found in reached:
                hit |= (inside & (found == page)).astype(jnp.int32)
            return hit

        if num_gen <= UNROLLED:
            return from_requests(jnp.int32(0), jnp.int32(0)) > 0
        return lax.fori_loop(b // UNROLLED, ceil_div(num_gen, UNROLLED), from_requests, jnp.int32(0)) > 0


@functools.partial(jax.jit, static_argnames=("layout", "first_row"))
def store_gen_context(
    pool: jax.Array,
    latents: jax.Array,
    ctx_len: jax.Array,
    slots: jax.Array,
    num_accepted: jax.Array,
    block_tables: jax.Array,
    block_counts: jax.Array,
    *,
    layout: str = "layer_major",
    first_row: int = 0,
) -> jax.Array:
    """The pool with `latents [B*(K+1), L, D]` stored in every layer's pages, in place if the pool is donated.

    One launch, one program per token: mask, clamp, page lookup and the write of all layers. A program whose place a
    later token takes writes nothing, so no two write to one place.
    """
    num_gen = slots.shape[0]
    if num_gen == 0 or pool.size == 0:
        return pool
    width = latents.shape[0] // num_gen
    shape = PoolShape.of(pool, layout)

    def store_gen_context_kernel(
        latents: Ref, ctx_len: Ref, slots: Ref, num_accepted: Ref, block_tables: Ref, block_counts: Ref, pool: Ref
    ) -> None:
        b, j = program("request", num_gen), program("token", width)
        to = Destinations(ctx_len, slots, block_tables, block_counts, shape.page_size, first_row, width - 1)
        start, last = to.columns(b)
        position = jnp.maximum(jnp.minimum(start + j, last), 0)
        page, offset = to.page(b, position // shape.page_size), position % shape.page_size
        writes = (last >= 0) & shape.holds(page) & ~to.later_write(b, j, page, offset)
        move_rows(
            pool,
            shape,
            tuple(range(shape.num_layers)),
            lambda layer: latents.at[b * width + j, layer],
            page,
            offset,
            writes,
            accepted=j < jnp.clip(num_accepted[b], 1, width),
        )

    pool_ref = jax.new_ref(pool)
    launch(store_gen_context_kernel, out_type=(), grid={"token": width, "request": num_gen})(
        latents, ctx_len, slots, num_accepted, block_tables, block_counts, pool_ref
    )
    return jax.freeze(pool_ref)
