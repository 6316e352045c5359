"""Floats as integers of their own width, for values that must keep every bit.

XLA on a CPU may carry a bf16 through fp32 registers in a select or a concatenation, and the way back flushes subnormals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import bitcast_convert_type


def as_bits(x: jax.Array) -> jax.Array:
    """The bit patterns of a 2- or 4-byte float array, as uint16 or uint32."""
    return bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The floats with these bit patterns."""
    return bitcast_convert_type(bits, dtype)


def times_zero(x: jax.Array) -> jax.Array:
    """The bits of `x * 0`: a zero with x's sign where x is finite, NaN where it is infinite or NaN."""
    bits = as_bits(x)
    sign = jnp.array(1 << (8 * x.dtype.itemsize - 1), bits.dtype)
    exponent = as_bits(jnp.array(jnp.inf, x.dtype))
    nan = as_bits(jnp.array(jnp.nan, x.dtype))
    return jnp.where((bits & exponent) == exponent, nan, bits & sign)


def keep_or_zero(keep: jax.Array, x: jax.Array) -> jax.Array:
    """`x` bit for bit where `keep`, its product with zero elsewhere."""
    return from_bits(jnp.where(keep, as_bits(x), times_zero(x)), x.dtype)
