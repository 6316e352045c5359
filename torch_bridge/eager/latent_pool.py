"""Writing latents into the paged pool in place, duplicates resolved before the scatter."""

from __future__ import annotations

import torch


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
    num_pages = pool.shape[1] if layout == "layer_major" else pool.shape[0]
    page_size = pool.shape[2]
    layers = slice(None) if layer is None else layer
    by_page = pool.transpose(0, 1) if layout == "layer_major" else pool

    valid = (pages >= 0) & (pages < num_pages)
    destination = torch.where(valid, pages * page_size + offsets, -1)
    order = torch.arange(pages.shape[0], device=pool.device)
    same = destination[:, None] == destination[None, :]
    last = torch.where(same, order, -1).amax(dim=1)
    any_valid = torch.where(valid, order, -1).amax()
    chosen = torch.where(valid, last, last[any_valid.clamp(min=0)])
    pages = torch.where(any_valid >= 0, pages[chosen], 0)
    offsets = torch.where(any_valid >= 0, offsets[chosen], 0)

    values = latents[chosen]
    nothing_to_write = by_page[pages[0], layers, offsets[0]]
    values = torch.where(any_valid >= 0, values, nothing_to_write)
    if layer is None:
        by_page.transpose(1, 2)[pages, offsets] = values
    else:
        by_page[pages, layer, offsets] = values
