from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from . import contracts
from .backends import kernel
from .checks import Layout, dtype_name, pool_dims


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """What decides whether a kernel can run an attention; all of it is static."""

    B: int
    block_size: int
    width: int
    kv_lora_rank: int
    page_size: int
    dtypes: tuple[str, ...]
    """Dtypes of query, block latents and pool, each once."""

    @classmethod
    def of(cls, query: Any, block_latents: Any, pool: Any, kv_lora_rank: int, layout: Layout) -> AttentionShape:
        """The shape of a call of `block_attention`."""
        page_size = pool_dims("block_attention", pool, layout)[2]
        B, block_size, _, width = query.shape
        dtypes = tuple(sorted({dtype_name(x) for x in (query, block_latents, pool)}))
        return cls(B, block_size, width, kv_lora_rank, page_size, dtypes)


def gather_context(pool: jax.Array, page_tables: jax.Array, layer: int, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """One layer's pages of each row, laid end to end.

    Returns:
        latents `[B, max_blocks*P, D]` and, per position, whether its page exists `[B, max_blocks*P]`.
    """
    pool = jnp.asarray(pool)
    num_pages = pool.shape[1] if layout == "layer_major" else pool.shape[0]
    exists = (page_tables >= 0) & (page_tables < num_pages)
    pages = jnp.where(exists, page_tables, 0)
    gathered = pool[layer, pages] if layout == "layer_major" else pool[pages, layer]
    num_rows, max_blocks, page_size, width = gathered.shape
    exists = jnp.repeat(exists, page_size, axis=1)
    return gathered.reshape(num_rows, max_blocks * page_size, width), exists


def block_attention(
    query: jax.Array,
    block_latents: jax.Array,
    pool: jax.Array,
    page_tables: jax.Array,
    advertised: jax.Array,
    *,
    layer: int,
    scale: float,
    kv_lora_rank: int,
    layout: Layout = "layer_major",
    backend: str = "xla",
) -> jax.Array:
    """Absorbed MLA attention of every block query over the stored context and the whole block (non-causal).

    Scores, softmax and the weighted sum are in fp32. Keys at or past `advertised` belong to other requests: they are
    masked, and zeroed, since a zero weight times a NaN is a NaN.

    Args:
        query: `[B, block_size, heads, D]`, the absorbed query `q_nope @ k_b` and the rotated `q_rope`.
        block_latents: `[B, block_size, D]` of this layer.
        pool: `[L, pages, P, D]`, or `[pages, L, P, D]` with `layout="page_major"`.
        page_tables: `[B, max_blocks]` int32.
        advertised: `[B]` int32, context tokens to attend to.
        layer, scale, kv_lora_rank: static; `scale` multiplies the scores.

    Returns:
        `[B, block_size, heads, kv_lora_rank]` in the query's dtype: the latent part of the output, before `v_b`.

    Raises:
        TypeError, ValueError: wrong dtype or shape, `layer` out of range.
    """
    contracts.block_attention(query, block_latents, pool, page_tables, advertised, layer, kv_lora_rank, layout)
    if backend != "xla":
        return kernel("block_attention", backend)(
            query, block_latents, pool, page_tables, advertised,
            layer=layer, scale=scale, kv_lora_rank=kv_lora_rank, layout=layout,
        )  # fmt: skip

    num_gen, block_size = query.shape[:2]
    context, exists = gather_context(pool, page_tables, layer, layout)
    in_context = exists & (jnp.arange(context.shape[1]) < advertised[:, None])
    keys = jnp.concatenate([jnp.where(in_context[:, :, None], context, 0), block_latents], axis=1).astype(jnp.float32)
    visible = jnp.concatenate([in_context, jnp.ones((num_gen, block_size), bool)], axis=1)

    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bthd,bkd->bthk", query.astype(jnp.float32), keys, precision=exact) * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -jnp.inf), axis=-1)
    output = jnp.einsum("bthk,bkr->bthr", weights, keys[..., :kv_lora_rank], precision=exact)
    return output.astype(query.dtype)
