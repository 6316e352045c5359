"""The output head on a step's few draft slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdspark.params import DrafterParams

from .streamed_product import streamed_product, unsupported, whole_rows

__all__ = ["draft_logits", "unsupported"]


def draft_logits(params: DrafterParams, slot_hidden: jax.Array) -> jax.Array:
    """`jdspark.drafter.draft_logits`."""
    assert params.lm_head is not None
    B, K, hidden_size = slot_hidden.shape
    x = whole_rows(slot_hidden.reshape(B * K, hidden_size).astype(params.lm_head.dtype))
    (logits,) = streamed_product(x, [params.lm_head], out_dtype=jnp.float32, name="lm_head")
    return logits.values[: B * K].reshape(B, K, -1)
