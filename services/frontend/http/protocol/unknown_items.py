"""The rule for items of a conversation whose type the server does not know.

Clients for agents send the whole conversation with each request. If an item of the history were
refused, every later request of the conversation would be refused too. An item of an unknown type is
therefore left out of the prompt, and named in a header of the answer. An item that holds text of
the user is refused instead, since the model would answer without having read the text.

    Annotated[TextBlock, Tag("text")] | LeftOut | Refused,
    by_type({"text": "text"}, others=tag_of_unknown),
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Tag

from services.frontend.http.bodies.object_kinds import LeftOutItem, UnknownKind

LEFT_OUT = "left_out"
"""Tag of the items that are left out."""

REFUSED = "unknown"
"""Tag of the items that are refused."""

LeftOut = Annotated[LeftOutItem, Tag(LEFT_OUT)]
Refused = Annotated[UnknownKind, Tag(REFUSED)]

MEDIA = frozenset(
    {"image", "image_url", "input_image", "input_audio", "input_file", "audio", "video", "file"}
    | {"video_url", "audio_url", "document", "container_upload", "computer_screenshot"}
)
"""Types of items that show the model something other than text. The user may ask about what the
item shows, so a user's item of such a type is refused."""

_PROGRAMS = ("_call", "_call_output", "_use", "_result", "_output")
"""Ends of the names of types that models, tools and servers write, and users do not."""

_LABELS = frozenset({"type", "id", "name", "role", "status", "phase", "model", "signature"})
_LABEL_ENDS = ("_id", "_type", "_name")
"""Names, and ends of names, of fields whose texts label an item, and are not what a user says."""

MAX_DEPTH = 64
"""Depth to which an item is searched for text. A deeper item is treated as an item with text."""


def tag_of_unknown(item: Mapping[str, Any]) -> str:
    """Returns the tag of an item of an unknown type that the user may have written."""
    kind = item.get("type")
    if kind in MEDIA:
        return REFUSED
    if isinstance(kind, str) and kind.endswith(_PROGRAMS):
        return LEFT_OUT
    return REFUSED if _has_text(item, MAX_DEPTH) else LEFT_OUT


def _has_text(value: object, depth: int) -> bool:
    """Returns whether a JSON value holds a text that is more than a label."""
    match value:
        case str():
            return bool(value.strip())
        case dict():
            fields = [field for name, field in value.items() if not _is_label(name)]
            return bool(fields) and (not depth or any(_has_text(f, depth - 1) for f in fields))
        case list():
            return bool(value) and (not depth or any(_has_text(f, depth - 1) for f in value))
    return False


def _is_label(name: str) -> bool:
    return name in _LABELS or name.endswith(_LABEL_ENDS)
