"""The torch side: the unfused chain (`torch_bridge.eager`), the twin of the whole step, and the bridge to JAX."""

from .bridge import (
    BridgeError,
    Comparison,
    bitwise_equal,
    compare,
    donating,
    largest_difference,
    shares_memory,
    to_jax,
    to_torch,
)

__all__ = [
    "BridgeError",
    "Comparison",
    "bitwise_equal",
    "compare",
    "donating",
    "largest_difference",
    "shares_memory",
    "to_jax",
    "to_torch",
]
