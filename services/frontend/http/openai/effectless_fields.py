"""Fields that clients send to other servers and that choose no token: they are read and do nothing
here."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

MAX_METADATA = 16
"""Items of metadata at most, as in the OpenAI API."""


def _check_metadata(value: object) -> object:
    """Bounds it before validation, which would make an error for each of a million items."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} items; at most {MAX_METADATA} may be")
    return value


class EffectlessFields(BaseModel):
    """The fields of both kinds of generation that do nothing."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_check_metadata)] = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None
