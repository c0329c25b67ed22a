"""The rule for items of a conversation whose type the server does not know.

Clients for agents send the whole conversation with each request. If an item of the history were
refused, every later request of the conversation would be refused too. An item of an unknown type is
therefore left out of the prompt, and named in a header of the answer. A picture is replaced by a
note, so that the model can say that it does not see the picture. An item that holds text of the
user is refused instead, because the model would answer without having read the text. The union of
the types of an item ends like this:

    Annotated[TextBlock, Tag("text")] | LeftOut | Refused,
    by_type({"text": "text"}, others=tag_of_unknown),
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Tag

from services.frontend.http.bodies.object_kinds import LeftOutItem, Unknown, UnknownKind
from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH

LEFT_OUT = "left_out"
"""Tag of the items that are left out."""

REFUSED = "unknown"
"""Tag of the items that are refused."""

LeftOut = Annotated[LeftOutItem, Tag(LEFT_OUT)]
Refused = Annotated[UnknownKind, Tag(REFUSED)]

PICTURES: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Maps the types of items that are pictures to the words by which a note names them."""

DOCUMENTS = frozenset(
    {"input_audio", "audio", "audio_url", "input_file", "file", "document", "container_upload"}
)
"""Types of items that hold words of the user in a form that is not text, such as a PDF or a
recording. A user's item of such a type is refused."""

_PROGRAMS = ("_call", "_call_output", "_use", "_result", "_output")
"""Endings of item types. Items of such types are written by models, tools and servers, and not by
users."""

_LABELS = frozenset({"type", "id", "name", "role", "status", "phase", "model", "signature"})
_LABEL_ENDS = ("_id", "_type", "_name")
"""Endings of the names of fields whose text only labels an item and is not a text that the user
wrote, such as `tool_id`. `_LABELS` has such names in full."""

MAX_DEPTH = 64
"""Largest depth to which an item is searched for text. An item that is nested deeper counts as an
item with text."""


def tag_of_unknown(item: Mapping[str, Any]) -> str:
    """Returns the tag of an item of an unknown type that the user may have written: `LEFT_OUT` or
    `REFUSED`."""
    kind = item.get("type")
    if kind in DOCUMENTS:
        return REFUSED
    if isinstance(kind, str) and (kind in PICTURES or kind.endswith(_PROGRAMS)):
        return LEFT_OUT
    return REFUSED if _has_text(item, MAX_DEPTH) else LEFT_OUT


def is_noted(item: object) -> bool:
    """Returns whether a note must replace an item that is left out of a user's turn. Only pictures
    are replaced by a note."""
    return isinstance(item, LeftOutItem) and item.type in PICTURES


def note_of(item: Unknown) -> str:
    """Returns the note that the model reads in place of an item that is left out."""
    kind = item.type if isinstance(item, LeftOutItem) else "item"
    return f"[{PICTURES.get(kind, kind[:MAX_NAME_LENGTH])} left out]"


def _has_text(value: object, depth: int) -> bool:
    """Returns whether a JSON value holds text of the user, and not only labels. Nothing deeper than
    `depth` is searched: a value there counts as text unless it is empty."""
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
