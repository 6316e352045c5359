"""The context projection of a step's few rows in two products: `fc` with the norm behind it, and every layer's `kv_a_proj`."""

from __future__ import annotations

import jax

from jdspark.config import DrafterConfig
from jdspark.ops.linear import linear
from jdspark.params import DrafterParams

from .streamed_product import FEW_ROWS, Normed, normed_rows, streamed_product, unsupported, whole_rows

__all__ = ["compress_context", "unsupported"]


def compress_context(params: DrafterParams, config: DrafterConfig, captured: jax.Array) -> jax.Array:
    """`jdspark.drafter.compress_context`; the norm multiplies by the row's factor behind the second product."""
    assert params.fc is not None
    assert params.hidden_norm is not None
    num_layers, width, hidden_size = params.kv_a_proj.shape
    (compressed,) = streamed_product(
        projected(params.fc, params.hidden_norm, whole_rows(captured)), [params.kv_a_proj.reshape(-1, hidden_size)],
        eps=config.rms_norm_eps, name="context_latents",
    )  # fmt: skip
    return compressed.values[: captured.shape[0]].reshape(-1, num_layers, width)


def projected(fc: jax.Array, norm: jax.Array, captured: jax.Array) -> Normed:
    """`captured @ fc.T` and most of the norm behind it.

    With more than a few rows by XLA's product, which is faster: its programs have more rows of the weights for each of x.
    """
    if captured.shape[0] > FEW_ROWS:
        return normed_rows(linear(captured, fc), norm)
    (result,) = streamed_product(captured.astype(fc.dtype), [fc], next_norms=[norm], name="context_projection")
    return result.normed
