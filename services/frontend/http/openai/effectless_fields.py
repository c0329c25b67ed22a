"""Fields that clients send to other servers and that do not affect which tokens are generated. The
server accepts and ignores these fields."""

from typing import Annotated

from services.frontend.http.bodies.metadata import FEW_LABELS
from services.frontend.http.bodies.object_kinds import ExactModel


class EffectlessFields(ExactModel):
    """Fields of completions and of chats that the server accepts and ignores."""

    user: str | None = None
    """Does nothing."""
    safety_identifier: str | None = None
    """Does nothing."""
    metadata: Annotated[dict[str, str] | None, FEW_LABELS] = None
    """Does nothing; 16 items at most."""
    store: bool | None = None
    """Does nothing: no answer is stored."""
    service_tier: str | None = None
    """Does nothing."""
    prompt_cache_key: str | None = None
    """Does nothing."""
    prompt_cache_retention: str | None = None
    """Does nothing."""
    request_id: str | None = None
    """Does nothing: the id of a request is given by the header `x-request-id`."""
    spaces_between_special_tokens: bool | None = None
    """Does nothing."""
