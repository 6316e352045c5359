"""The output head on a step's few draft slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdspark.drafter import ProductShape
from jdspark.params import DrafterParams

from .streamed_product import FEW_ROWS, streamed_product, whole_rows
from .streamed_product import unsupported as unsupported_product


def unsupported(shape: ProductShape) -> str | None:
    """None if the kernel can run this product here, and not slower than XLA's, else the reason."""
    if reason := unsupported_product(shape):
        return reason
    return f"it has {shape.rows} rows, XLA's product is faster above {FEW_ROWS}" if shape.rows > FEW_ROWS else None


def draft_logits(params: DrafterParams, slot_hidden: jax.Array) -> jax.Array:
    """`jdspark.drafter.draft_logits`."""
    assert params.lm_head is not None
    B, K, hidden_size = slot_hidden.shape
    x = whole_rows(slot_hidden.reshape(B * K, hidden_size).astype(params.lm_head.dtype))
    (logits,) = streamed_product(x, [params.lm_head], out_dtype=jnp.float32, name="lm_head")
    return logits.values[: B * K].reshape(B, K, -1)
