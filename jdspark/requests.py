"""Host side: which request lives in which slot."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .config import Geometry
from .state import DecodeState

logger = logging.getLogger("jdspark")

RequestId = Hashable


@functools.partial(jax.jit, donate_argnums=0)
def _clear(ctx_len: jax.Array, slots: jax.Array) -> jax.Array:
    return ctx_len.at[slots].set(0)


def _expect_several(method: str, request_ids: Iterable[RequestId]) -> None:
    """A string is an id, not several: its letters would be taken for unknown ones."""
    if isinstance(request_ids, str | bytes):
        raise TypeError(
            f"RequestSlots.{method}: request_ids is {request_ids!r}, expected several ids: {method}([{request_ids!r}])"
        )


class RequestSlots:
    """Maps request ids to slots of a `DecodeState`, first free slot first.

    An id that has no slot (unknown, graph padding, attention-DP dummy, refused) maps to the dummy slot, whose context is
    always empty: such a row drafts from nothing, and its output is still the target's own.
    """

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self._slot_of: dict[RequestId, int] = {}
        self._stored: dict[RequestId, int] = {}
        self._refused: set[RequestId] = set()
        self._stale: set[int] = set()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._slot_of

    @property
    def free_slots(self) -> list[int]:
        """Slots no request holds, lowest first."""
        taken = set(self._slot_of.values())
        return [slot for slot in range(self.geometry.max_batch) if slot not in taken]

    def slot(self, request_id: RequestId) -> int:
        """The request's slot, or the dummy slot."""
        return self._slot_of.get(request_id, self.geometry.dummy_slot)

    def slots(self, request_ids: Sequence[RequestId]) -> np.ndarray:
        """`[len(request_ids)]` int32, the dummy slot for every id without one. Raises ValueError for a repeated id."""
        _expect_several("slots", request_ids)
        held = [request_id for request_id in request_ids if request_id in self._slot_of]
        if len(set(held)) != len(held):
            raise ValueError(f"RequestSlots: request ids {list(request_ids)!r} name a request twice in one batch")
        return np.array([self.slot(request_id) for request_id in request_ids], np.int32)

    def admit_chunk(self, request_id: RequestId, first_position: int, num_tokens: int, allocated: int) -> int:
        """Take in a prefill chunk of `num_tokens` at `first_position`; `allocated` = tokens its pages hold.

        A chunk at position 0 starts the request afresh (a reused id keeps its slot), a later one appends. Returns the
        slot, or the dummy slot, with a warning, if the chunk is refused: then the request drafts nothing (its output
        stays lossless) and its slot is free again. Refused are a chunk that exceeds `min(max_ctx, allocated)`, since a
        truncated context would be drafted from as if it were whole; a chunk that does not continue what is stored; and
        a new request when no slot is free.
        """
        if first_position < 0 or num_tokens < 1:
            raise ValueError(f"admit_chunk: first_position={first_position}, num_tokens={num_tokens}: expected >= 0 and >= 1")
        end, limit = first_position + num_tokens, min(self.geometry.max_ctx, allocated)
        if first_position > 0 and self._stored.get(request_id) != first_position:
            have = self._stored.get(request_id, "nothing")
            return self._refuse(request_id, f"its chunk starts at {first_position}, but {have} of its context is stored")
        if end > limit:
            return self._refuse(request_id, f"its context of {end} tokens exceeds min(max_ctx, allocated) = {limit}")
        self._refused.discard(request_id)
        slot = self._assign(request_id)
        if slot != self.geometry.dummy_slot:
            self._stored[request_id] = end
            self._stale.discard(slot)  # the prefill store sets this slot's length, a late clear must not undo that
        return slot

    def admit_generation(self, request_id: RequestId) -> int:
        """The slot of a gen request; one that never prefilled here (disaggregated serving) gets an empty slot.

        A request whose prefill was refused stays in the dummy slot until it is finished: its context has a hole.
        """
        if request_id in self._refused:
            return self.geometry.dummy_slot
        self._stored.pop(request_id, None)  # from now on only the device knows the length
        return self._assign(request_id)

    def finish(self, request_ids: Iterable[RequestId]) -> None:
        """Give the slots of finished requests back; unknown ids are ignored. `clear` must follow before the next step."""
        _expect_several("finish", request_ids)
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            self._stored.pop(request_id, None)
            self._refused.discard(request_id)
            if slot is not None:
                self._stale.add(slot)

    def clear(self, state: DecodeState) -> DecodeState:
        """Set `ctx_len` to 0 for every slot given back since the last call. The state's `ctx_len` is donated.

        Call it after `finish`, `admit_chunk` and `admit_generation` and before the next prefill store or step.
        """
        if not self._stale:
            return state
        # padded to one length, so that it compiles once; the dummy's length is 0 anyway
        slots = np.full(self.geometry.max_batch + 1, self.geometry.dummy_slot, np.int32)
        slots[: len(self._stale)] = sorted(self._stale)
        cleared = dataclasses.replace(state, ctx_len=_clear(state.ctx_len, jnp.asarray(slots)))
        self._stale.clear()  # only now: a state that was donated already raises above
        return cleared

    def _assign(self, request_id: RequestId) -> int:
        if request_id not in self._slot_of:
            free = self.free_slots
            if not free:
                logger.warning("request %r: no free slot of %d, it drafts nothing", request_id, self.geometry.max_batch)
                return self.geometry.dummy_slot
            self._slot_of[request_id] = free[0]
        return self._slot_of[request_id]

    def _refuse(self, request_id: RequestId, why: str) -> int:
        logger.warning("request %r drafts nothing: %s", request_id, why)
        self.finish([request_id])
        self._refused.add(request_id)
        return self.geometry.dummy_slot
