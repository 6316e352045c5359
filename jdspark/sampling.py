"""How a request's tokens are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .ops import RowSampling
from .ops.checks import expect_number


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Greedy at temperature 0; otherwise tokens are drawn from the target's filtered distribution.

    A request's draws depend on its seed and positions alone, so a run repeats, in whatever batch it is. Raises ValueError
    or TypeError naming the field that is out of range.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens, and those as probable as the k-th; 0 keeps all."""
    top_p: float = 1.0
    """Of what top_k kept, keep the most probable tokens that together reach this probability."""
    seed: int = 0
    """A uint32."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"SamplingParams: {name} is {value!r}, expected a number")
            if not abs(value) <= float(np.finfo(np.float32).max):  # so a NaN, too
                raise ValueError(f"SamplingParams: {name} is {value!r}, expected a finite number that fits into float32")
        if self.temperature < 0:
            raise ValueError(f"SamplingParams: temperature is {self.temperature}, expected at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams: top_p is {self.top_p}, expected above 0 and at most 1 (1 keeps all)")
        expect_number("SamplingParams", "top_k", self.top_k, 0)
        expect_number("SamplingParams", "seed", self.seed, 0, 2**32 - 1)

    @property
    def greedy(self) -> bool:
        """Whether every token is the target's argmax."""
        return self.temperature == 0


def row_sampling(requests: Sequence[SamplingParams], positions: Sequence[int]) -> RowSampling:
    """The operands of the sampling ops for a batch: one row per request, `positions` `[rows]` that of its next token."""
    return RowSampling(
        temperature=np.array([request.temperature for request in requests], np.float32),
        top_k=np.array([request.top_k for request in requests], np.int32),
        top_p=np.array([request.top_p for request in requests], np.float32),
        seeds=np.array([request.seed for request in requests], np.uint32),
        positions=np.asarray(positions, np.int32),
    )
