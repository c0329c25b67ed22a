"""Tests of connections run on the event loop that services run on: its transports matter there."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], Any]] | None:
    """Returns the loops that a test runs on; None for the default one."""
    is_here = item.path.name == "test_connection.py"
    return {"uvloop": uvloop.new_event_loop} if is_here else None
