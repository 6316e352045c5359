"""What both trainings share: one jitted optimizer step, and reports on the way."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def cast(params: Any, dtype: str) -> Any:
    """Every floating-point leaf in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def schedule(peak: float, steps: int, warm_up: float = 0.04) -> optax.Schedule:
    """Linear warm-up over a fraction of the steps, then a cosine to a tenth of the peak."""
    warm = max(1, round(warm_up * steps))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(steps, warm + 1), peak / 10)


def adamw(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's norm at 1; only matrices decay."""
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=weight_decay, mask=matrices))


class Optimizer:
    """`params, moments, metrics = step(params, moments, *batch)`: gradient, update, norm; compiled once per shape.

    `loss(params, *batch)` returns the loss and a dictionary of scalars to report.
    """

    def __init__(
        self, transformation: optax.GradientTransformation, loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    ):
        def step(params: Any, moments: Any, *batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
            (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, *batch)
            updates, moments = transformation.update(gradients, moments, params)
            metrics = {"loss": value, **metrics, "gradient_norm": optax.tree.norm(gradients)}
            return optax.apply_updates(params, updates), moments, metrics

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self, params: Any, moments: Any, *batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        return self._step(params, moments, *batch)


@dataclasses.dataclass
class Progress:
    """Prints the metrics every `every` steps, averaged over them; `history` keeps what was printed."""

    name: str
    steps: int
    every: int = 100
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    _pending: list[dict[str, jax.Array]] = dataclasses.field(default_factory=list)
    _started: float = dataclasses.field(default_factory=time.monotonic)

    def __call__(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._pending.append(metrics)
        if (step + 1) % self.every and step + 1 != self.steps:
            return
        means = {name: float(jnp.mean(jnp.stack([entry[name] for entry in self._pending]))) for name in metrics}
        self._pending.clear()
        self.history.append({"step": step + 1, **means})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        print(f"{self.name} {step + 1}/{self.steps}: {shown}, {time.monotonic() - self._started:.0f} s", flush=True)
