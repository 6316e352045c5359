"""Page ownership: whatever the order of calls, a page is free or owned by exactly one request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdspark import PageAllocator, PageError

CALLS = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(1, 5)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(num_pages=st.integers(1, 9), calls=CALLS)
def test_a_page_has_one_owner(num_pages, calls):
    allocator = PageAllocator(num_pages)
    model: dict[int, tuple[int, ...]] = {}
    for allocates, request_id, count in calls:
        free = num_pages - sum(map(len, model.values()))
        refused = (request_id in model or count > free) if allocates else request_id not in model
        if refused:
            with pytest.raises(PageError, match=f"request {request_id} "):
                allocator.allocate(request_id, count) if allocates else allocator.free(request_id)
        elif allocates:
            model[request_id] = allocator.allocate(request_id, count)
            assert len(model[request_id]) == count
        else:
            allocator.free(request_id)
            del model[request_id]
        owned = [page for pages in model.values() for page in pages]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(owned)
        assert all(allocator.pages(request_id) == pages for request_id, pages in model.items())
    for request_id in model:
        allocator.free(request_id)
    assert sorted(allocator.allocate("all", num_pages)) == list(range(num_pages))


def test_errors_name_the_request():
    allocator = PageAllocator(4)
    allocator.allocate("a", 3)
    with pytest.raises(PageError, match="request 'b' needs 2 pages, 1 of 4 are free"):
        allocator.allocate("b", 2)
    assert "b" not in allocator
    with pytest.raises(PageError, match="request 'a' already holds 3 pages"):
        allocator.allocate("a", 1)
    allocator.free("a")
    for call in (allocator.free, allocator.pages):
        with pytest.raises(PageError, match="request 'a' holds no pages"):
            call("a")
    with pytest.raises(ValueError, match="count is 0"):
        allocator.allocate("a", 0)
    with pytest.raises(ValueError, match="num_pages is 0"):
        PageAllocator(0)
