"""Fields that clients send to other servers and that choose no token: they are read and do nothing
here."""

from typing import Annotated

from pydantic import BaseModel

from services.frontend.http.bodies.metadata import FEW_LABELS


class EffectlessFields(BaseModel):
    """The fields of both kinds of generation that do nothing."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[str, str] | None, FEW_LABELS] = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None
