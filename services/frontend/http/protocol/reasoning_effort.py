"""How much a model is asked to reason, in the words of chat templates."""

from typing import Any

NO_REASONING = ("none", "minimal")
"""Efforts that turn reasoning off, where the template can."""


def template_kwargs(effort: str | None) -> dict[str, Any]:
    """Returns the variables of a chat template that stand for an effort of reasoning."""
    if effort is None:
        return {}
    off = {"enable_thinking": False} if effort in NO_REASONING else {}
    return {"reasoning_effort": effort, **off}
