"""What is measured where, and the operands of a measurement."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DrafterConfig, Geometry
from ..params import DrafterParams
from ..presets import K3_RANK, K3_RANK_VOCAB, TINY, k3_rank_drafter, random_drafter
from ..state import DecodeState, init_state
from ..step import StepInputs


class Cell(NamedTuple):
    """One size of batch at one context length."""

    B: int
    context: int


NO_CELL = Cell(0, 0)
"""Of a row or a job that is about none."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A drafter, the cells of each part and how often they are run."""

    label: str
    config: DrafterConfig
    vocab: int
    """Columns of the target's logits; rows of `lm_head` and `w2`."""
    dtype: str
    page_size: int
    bookkeeping: tuple[Cell, ...]
    acceptance: tuple[Cell, ...]
    """Cells of the bookkeeping with acceptance and next tokens, which do not depend on the context."""
    step: tuple[Cell, ...]
    every_step: tuple[Cell, ...]
    """Cells that are measured with the other combinations of switches and backends, after all of `step`."""
    parts: tuple[Cell, ...]
    compiled: tuple[Cell, ...]
    """Cells of `torch.compile`."""
    bookkeeping_pages: int
    """Pages of the pool that the bookkeeping writes into; only the tails of the requests' contexts are pages of their own."""
    copied_bytes: int
    """Of the copy that measures the bandwidth, and of the flush between calls."""
    loop: int
    """Passes over the sets of operands in one dispatch of the bookkeeping."""
    step_loop: int = 100
    """The most steps in one dispatch of the whole step's loop; 0 leaves it out, as on a CPU, where there is no device time."""
    steps_left_out: frozenset[str] = frozenset()
    """JAX's variants of the whole step that are not measured: a Pallas step takes the longest to trace."""
    rounds: int = 7
    calls: int = 20
    step_calls: int = 60
    """Of the whole step, back to back."""
    profiled_calls: int = 8
    sets: int = 3
    """Operands that are taken in turn."""
    K: int = 7

    def geometry(self, cell: Cell, num_pages: int | None = None) -> Geometry:
        """The run's sizes: room for the context and two blocks per request, lengths that stay at the context.

        A request's length is clamped to `max_ctx`: it stays where it is, however many steps are timed.
        """
        columns = -(-(cell.context + 2 * (self.K + 1)) // self.page_size) + 1
        return Geometry(
            max_batch=cell.B,
            max_draft_len=self.K,
            page_size=self.page_size,
            num_pages=cell.B * columns if num_pages is None else num_pages,
            max_blocks_per_seq=columns,
            max_ctx=cell.context,
            offset_divisor=10,
        )

    def drafter(self, seed: int) -> DrafterParams:
        """Random weights."""
        return k3_rank_drafter(seed) if self.config == K3_RANK else random_drafter(self.config, seed, dtype=self.dtype)


CONTEXTS = (2048, 32768, 65536, 98304, 131072, 393216)
BOOKKEEPING = (
    *(Cell(B, CONTEXTS[0]) for B in (1, 4, 32)), *(Cell(B, context) for B in (1, 32, 4) for context in CONTEXTS[1:]),
)  # fmt: skip
"""The most telling first: a time limit cuts off the end."""

_K3: dict[str, Any] = {
    "label": "one tensor-parallel rank of Kimi K3",
    "config": K3_RANK,
    "vocab": K3_RANK_VOCAB,
    "dtype": "bfloat16",
    "page_size": 32,
    "bookkeeping_pages": 12400,
    "copied_bytes": 1 << 30,
    "loop": 60,
}

FULL = Scale(
    **_K3,
    bookkeeping=BOOKKEEPING,
    acceptance=tuple(Cell(B, 2048) for B in (1, 4, 32)),
    step=(
        Cell(1, 2048), Cell(1, 131072), Cell(1, 393216), Cell(1, 65536), Cell(1, 32768), Cell(1, 98304),
        Cell(4, 2048), Cell(8, 2048), Cell(16, 2048), Cell(32, 2048),
    ),
    every_step=(Cell(1, 2048),),
    parts=(Cell(1, 2048), Cell(1, 131072), Cell(32, 2048)),
    compiled=BOOKKEEPING,
)  # fmt: skip

QUICK = dataclasses.replace(
    FULL,
    bookkeeping=(Cell(1, 2048), Cell(1, 131072)),
    acceptance=(Cell(1, 2048),),
    step=(Cell(1, 2048),),
    every_step=(),
    steps_left_out=frozenset({"jax fused, pallas"}),
    parts=(),
    compiled=(),
    rounds=5,
)
"""One request: the bookkeeping at two contexts, acceptance and whole step at one."""

CPU = Scale(
    label="a tiny drafter",
    config=TINY,
    vocab=TINY.vocab_size,
    dtype="float32",
    page_size=8,
    bookkeeping=(Cell(1, 64), Cell(1, 256), Cell(4, 64)),
    acceptance=(Cell(1, 64),),
    step=(Cell(1, 64), Cell(1, 256), Cell(4, 64)),
    every_step=(Cell(1, 64),),
    parts=(Cell(1, 64),),
    compiled=(),
    bookkeeping_pages=200,
    copied_bytes=1 << 24,
    loop=20,
    step_loop=0,
    step_calls=20,
    profiled_calls=0,
)

SMALLEST = dataclasses.replace(
    CPU,
    bookkeeping=CPU.bookkeeping[:2],
    step=CPU.step[:2],
    loop=2,
    rounds=3,
    calls=2,
    step_calls=2,
    sets=2,
    copied_bytes=1 << 20,
)
"""`--quick` on a CPU."""


def choose_scale(on_gpu: bool, quick: bool) -> Scale:
    """The scale for this machine."""
    return (QUICK if quick else FULL) if on_gpu else (SMALLEST if quick else CPU)


def draw_offsets(rng: np.random.Generator, geometry: Geometry, B: int) -> np.ndarray:
    """`[1, B, 2, max_blocks]`: every page of the table is there.

    Pages are drawn without repetition while the pool has enough of them; else only the last three of each row, the ones
    that a step writes, are not shared.
    """
    columns = geometry.max_blocks_per_seq
    own = rng.permutation(geometry.num_pages)
    if geometry.num_pages >= B * columns:
        pages = own[: B * columns].reshape(B, columns)
    else:
        tail = min(3, columns)
        pages = rng.choice(own[B * tail :], (B, columns))
        pages[:, columns - tail :] = own[: B * tail].reshape(B, tail)
    offsets = np.full((1, B, 2, columns), -1, np.int32)
    offsets[0, :, 0] = pages * geometry.offset_divisor
    return offsets


def draw_inputs(rng: np.random.Generator, scale: Scale, geometry: Geometry, B: int) -> StepInputs:
    """A step's operands on the device: random logits, of whose drafts a random prefix is accepted, random hidden states."""
    K, rows = scale.K, B * (scale.K + 1)
    logits = rng.standard_normal((rows, scale.vocab), np.float32)
    best = logits.argmax(axis=1).reshape(B, K + 1)[:, :K]
    accepted = np.arange(K) < rng.integers(0, K + 1, B)[:, None]
    drafts = np.where(accepted, best, (best + 1) % scale.vocab)
    return StepInputs(
        logits=jnp.asarray(logits),
        draft_tokens=jnp.asarray(drafts.astype(np.int32)),
        captured=jnp.asarray(rng.standard_normal((rows, scale.config.captured_size), np.float32), scale.dtype),
        encoded_offsets=jnp.asarray(draw_offsets(rng, geometry, B)),
        slots=jnp.asarray(rng.permutation(B).astype(np.int32)),
    )


def filled_state(scale: Scale, geometry: Geometry) -> DecodeState:
    """A state whose requests all have the longest context, over a pool of random latents."""
    state = init_state(scale.config, geometry, dtype=scale.dtype)
    L, num_pages, page_size, width = state.pool.shape
    block = min(num_pages, 256)  # over and over: a large pool of fresh numbers would take more memory to draw than to hold
    fresh = jax.random.normal(jax.random.key(0), (L, block, page_size, width), scale.dtype)
    ctx_len = jnp.full(geometry.max_batch + 1, geometry.max_ctx, jnp.int32).at[-1].set(0)
    fill = jax.jit(lambda pool, fresh: jnp.take(fresh, jnp.arange(num_pages) % block, axis=1), donate_argnums=0)
    return dataclasses.replace(state, pool=fill(state.pool, fresh), ctx_len=ctx_len)
