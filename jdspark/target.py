"""What the engine asks of a target model."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from .ops.checks import Array


class Target(Protocol):
    """A target language model with a KV cache of its own, addressed by slot.

    Rows of a call are independent of one another: what a row returns depends on its own tokens and on what its slot's
    cache holds below `start`, never on the other rows. A token at position p attends to the positions `0 .. p` of its slot.
    Both calls write the cache entries of the tokens they are given, at `start .. start + width - 1`; a position at or past
    `max_len` writes nothing (JAX's dynamic_update_slice would shift such a write onto earlier positions: use a scatter with
    mode="drop"). Entries of padding and of rejected drafts stay in the cache until a later call overwrites them, which
    happens before any token attends to them; so a call must write its tokens before it attends. Several padding rows may
    share the scratch slot, with any contents.

    The target jits its calls. It may donate the cache it is given: the engine passes each one once and keeps the returned
    one. The engine calls with few shapes: B = 1 and T a power of two (at least 16) in `prefill`, B = 1, 2, 4, ... in
    `verify`. Integer operands are NumPy arrays; results stay on the device, where the engine's decode step runs as well.
    """

    vocab_size: int
    """`V`, the width of its logits."""
    captured_size: int
    """`T*H_t`: the hidden states of the layers that the drafter reads, side by side."""
    lm_head: Array
    """`[V, H]` with the drafter's H: the output head that the drafter shares. Not read if the drafter's weights have one."""

    def init_cache(self, num_slots: int, max_len: int) -> Any:
        """An empty cache of `num_slots` slots with `max_len` positions each: any pytree, the engine never looks inside.

        The engine asks for max_batch + 1 slots; the last is a scratch slot for padding rows.
        """
        ...

    def prefill(
        self, cache: Any, tokens: Array, start: Array, num_tokens: Array, slots: Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Run a chunk of each row's prompt.

        Args:
            cache: as returned by `init_cache` or the last call.
            tokens: `[B, T]` int32; those at `num_tokens` and behind it are padding.
            start: `[B]` int32, position of each row's first token: 0, or where the row's last chunk ended.
            num_tokens: `[B]` int32, `1 .. T`.
            slots: `[B]` int32.

        Returns:
            logits `[B, V]` float32 of each row's last real token, captured `[B, T, T*H_t]`, the cache.
        """
        ...

    def verify(self, cache: Any, tokens: Array, start: Array, slots: Array) -> tuple[jax.Array, jax.Array, Any]:
        """Run each row's last token and its K drafts.

        Args:
            cache: as returned by the last call.
            tokens: `[B, K+1]` int32.
            start: `[B]` int32, position of each row's first token.
            slots: `[B]` int32, distinct but for the scratch slot.

        Returns:
            logits `[B, K+1, V]` float32, captured `[B, K+1, T*H_t]`, the cache.
        """
        ...
