"""Benchmarks collect garbage before they begin, which takes long where there are all tests."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Hides from the collector what there is before a module's tests."""
    gc.freeze()
    yield
    gc.unfreeze()
