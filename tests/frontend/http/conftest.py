"""Tests of connections run on the event loop that services run on: its transports matter there."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """Returns the loop that a test runs on."""
    if item.path.name == "test_connection.py":
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
