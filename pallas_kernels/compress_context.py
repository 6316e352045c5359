"""The context projection of a step's few rows in two launches: `fc` with the norm behind it, and every layer's `kv_a_proj`."""

from __future__ import annotations

import jax

from jdspark.config import DrafterConfig
from jdspark.params import DrafterParams

from .streamed_product import streamed_product, unsupported, whole_rows

__all__ = ["compress_context", "unsupported"]


def compress_context(params: DrafterParams, config: DrafterConfig, captured: jax.Array) -> jax.Array:
    """`jdspark.drafter.compress_context`; the norm multiplies by the row's factor behind the second product."""
    assert params.fc is not None
    assert params.hidden_norm is not None
    num_layers, width, hidden_size = params.kv_a_proj.shape
    x = whole_rows(captured.astype(params.fc.dtype))
    (projected,) = streamed_product(x, [params.fc], next_norms=[params.hidden_norm], name="context_projection")
    (compressed,) = streamed_product(
        projected.normed, [params.kv_a_proj.reshape(-1, hidden_size)], eps=config.rms_norm_eps, name="context_latents"
    )
    return compressed.values[: captured.shape[0]].reshape(-1, num_layers, width)
