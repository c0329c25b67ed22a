"""Joins the chunks of a stream. How tokens are divided among chunks depends on when they arrive."""

from typing import Any


def together(one: Any, other: Any) -> Any:
    """Joins two parts of a message: texts and lists are appended to each other, in objects by their
    keys. Other values, such as numbers, must be equal."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        return one | {name: together(one.get(name), value) for name, value in other.items()}
    if isinstance(one, str | list):
        return one + other
    assert one == other
    return one
