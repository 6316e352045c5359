"""Host side: which request owns which page of the latent pool."""

from __future__ import annotations

from .ops.checks import expect_number
from .requests import RequestId


class PageError(ValueError):
    """Pages were asked for that are not free, twice, or given back by a request that holds none; the message names it."""


class PageAllocator:
    """Hands out the pages `0 .. num_pages - 1`, all or nothing: a page is free or owned by exactly one request."""

    def __init__(self, num_pages: int):
        expect_number("PageAllocator", "num_pages", num_pages, 1)
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[RequestId, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._owned

    def allocate(self, request_id: RequestId, count: int) -> tuple[int, ...]:
        """Give `count` pages to a request that holds none. Raises PageError, with nothing changed, if it cannot."""
        expect_number("PageAllocator.allocate", "count", count, 1)
        if request_id in self._owned:
            raise PageError(f"request {request_id!r} already holds {len(self._owned[request_id])} pages; free them first")
        if count > len(self._free):
            raise PageError(f"request {request_id!r} needs {count} pages, {len(self._free)} of {self.num_pages} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        self._owned[request_id] = pages
        return pages

    def pages(self, request_id: RequestId) -> tuple[int, ...]:
        """The pages of a request, in the order of its tokens. Raises PageError if it holds none."""
        if request_id not in self._owned:
            raise PageError(f"request {request_id!r} holds no pages: it never got any, or gave them back")
        return self._owned[request_id]

    def free(self, request_id: RequestId) -> None:
        """Take a request's pages back. Raises PageError if it holds none, so a second call does."""
        pages = self.pages(request_id)
        del self._owned[request_id]
        self._free.extend(reversed(pages))
