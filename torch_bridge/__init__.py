"""The torch side: the unfused chain (`torch_bridge.eager`), the twin of the whole step, and the bridge to JAX.

The names below are imported on first use: JAX can reach this package's Triton sources without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import bridge

    return getattr(bridge, name)
