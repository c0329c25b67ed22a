"""Converts the requested effort of reasoning to variables of the chat template."""

from typing import Any

NO_REASONING = ("none", "minimal")
"""Efforts that turn reasoning off, if the chat template can turn it off."""


def template_kwargs(effort: str | None) -> dict[str, Any]:
    """Returns the variables of the chat template for an effort of reasoning. Returns no variables
    if `effort` is None."""
    if effort is None:
        return {}
    off = {"enable_thinking": False} if effort in NO_REASONING else {}
    return {"reasoning_effort": effort, **off}
