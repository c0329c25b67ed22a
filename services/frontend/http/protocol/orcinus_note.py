"""The field `orcinus` of answers, with facts about an answer that the protocol has no field for."""

from collections.abc import Iterable

from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class OrcinusNote(TypedDict):
    """Facts about an answer that the protocol has no field for."""

    schema_valid: bool
    """Whether the values of the answer match their JSON schemas, as checked at the end of the
    answer."""


class NoteFields(TypedDict, total=False):
    """The field of an answer that holds a note."""

    orcinus: OrcinusNote


def note_of(verdicts: Iterable[bool | None]) -> NoteFields:
    """Returns the note about the values of answers; no field if some answer has no verdict."""
    found = list(verdicts)
    if None in found:
        return {}
    return {"orcinus": {"schema_valid": all(found)}}
