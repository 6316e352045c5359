"""Writing latents into the paged pool in place, duplicates resolved before the scatter."""

from __future__ import annotations

from typing import Any

import torch

PAIRWISE = 1024
"""Up to this many entries are compared with one another, more of them through a table of the pool's places."""


def write_latents(
    pool: torch.Tensor,
    latents: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    layout: str,
    layer: int | None = None,
) -> None:
    """Write `latents [N, L, D]` (`[N, D]` for a single `layer`) at `pages [N]`, `offsets [N]`, the last on a place wins.

    A GPU leaves the order of `index_put_` open, so every entry is replaced by the last one with its destination, and
    one that may not write by any that may: equal values on equal places. Shapes stay fixed, so a CUDA graph can hold it.
    """
    if pages.shape[0] == 0 or pool.numel() == 0:
        return
    num_pages = pool.shape[1] if layout == "layer_major" else pool.shape[0]
    page_size = pool.shape[2]

    valid = (pages >= 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    destination = torch.where(valid, pages * page_size + offsets, -1)
    order = torch.arange(pages.shape[0], device=pool.device)
    last = last_writers(destination, num_pages * page_size)
    # one index per step, kept as a tensor of one element: a 0-d tensor would be read back to the host to index with
    anyone = torch.where(valid, order, -1).amax(dim=0, keepdim=True)
    someone_writes = anyone >= 0
    chosen = torch.where(valid, last, last[anyone.clamp(min=0)])
    pages = torch.where(someone_writes, pages[chosen], 0)
    offsets = torch.where(someone_writes, offsets[chosen], 0)

    def places(pages: torch.Tensor, offsets: torch.Tensor) -> tuple[Any, ...]:
        # indices of the pool itself, a tensor for the layer as well: into a view of it, as a number makes one, `torch.compile`
        # would copy the pool to write and copy it back
        layers = slice(None) if layer is None else torch.full_like(pages, layer)
        return (layers, pages, offsets) if layout == "layer_major" else (pages, layers, offsets)

    latents = latents[chosen]
    if layout == "layer_major" and layer is None:
        latents = latents.transpose(0, 1)
    unchanged = pool[places(pages[:1], offsets[:1])]
    pool[places(pages, offsets)] = torch.where(someone_writes.unsqueeze(-1), latents, unchanged)


def last_writers(destinations: torch.Tensor, num_places: int) -> torch.Tensor:
    """`[N]`: for each entry the last entry with the same destination (itself, if it is that); -1 counts as a place."""
    order = torch.arange(destinations.shape[0], device=destinations.device)
    if destinations.shape[0] <= PAIRWISE:
        return torch.where(destinations[:, None] == destinations[None, :], order, -1).amax(dim=1)
    table = destinations.new_full((num_places + 1,), -1)  # row 0 is destination -1
    return table.scatter_reduce_(0, destinations + 1, order, "amax")[destinations + 1]
