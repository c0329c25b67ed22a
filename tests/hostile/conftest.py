"""Everything in this folder attacks processes, and runs only when it is asked for."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if item.nodeid.startswith("tests/hostile/"):
            item.add_marker(pytest.mark.hostile)
