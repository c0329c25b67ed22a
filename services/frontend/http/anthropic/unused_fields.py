"""Fields that Anthropic's clients send and that do not affect which tokens are generated. The
fields are read, and do nothing here.

Claude Code sends `context_management`, `metadata` and `output_config`. The SDKs send the other
fields if the application sets them. The names of beta features come in a header, or in the field
`betas`.
"""

from typing import Any

from services.frontend.http.bodies.object_kinds import ExactModel


class UnusedFields(ExactModel):
    """Fields that the server accepts, and ignores, in the body of a conversation."""

    cache_control: Any = None
    """Does nothing: prompts are cached by default."""
    context_management: Any = None
    """Does nothing: no turn is removed from the conversation."""
    compaction: Any = None
    """Does nothing: a conversation that is too long is refused."""
    betas: Any = None
    """Does nothing."""
    mcp_servers: Any = None
    """Does nothing: the server calls no tools."""
    container: Any = None
    """Does nothing: the server runs no code."""
    service_tier: Any = None
    """Does nothing."""
    speed: Any = None
    """Does nothing."""
    inference_geo: Any = None
    """Does nothing."""
    fallbacks: Any = None
    """Does nothing: one model is served."""
    fallback_credit_token: Any = None
    """Does nothing."""
    billing_policy: Any = None
    """Does nothing."""
    diagnostics: Any = None
    """Does nothing."""
    thread: Any = None
    """Does nothing: no conversation is stored."""
    user_profile_id: Any = None
    """Does nothing."""
    workspace_id: Any = None
    """Does nothing."""
