"""The field `orcinus` of answers, with facts about an answer that the protocol has no field for."""

from collections.abc import Iterable, Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from services.frontend.generation.value_checks import verdict_of
from services.frontend.http.protocol.answer_object import answer_object


@answer_object
class OrcinusNote(TypedDict):
    """Facts about an answer that the protocol has no field for."""

    schema_valid: NotRequired[bool]
    """Whether the JSON values of the answer (its content and the arguments of its calls) match
    their JSON schemas, as checked at the end of the answer. The field is false if
    any value does not match. Otherwise it is missing if there was no value to check, or if a value
    could not be checked."""
    unenforced: NotRequired[list[str]]
    """Names of the fields and keywords of JSON schemas that are not enforced, as in the header
    `x-orcinus-unenforced`."""


class NoteFields(TypedDict, total=False):
    """The fields of an answer that Orcinus adds: a note and a receipt."""

    orcinus: OrcinusNote
    receipt: dict[str, Any]


def note_of(verdicts: Iterable[bool | None], unenforced: Sequence[str] = ()) -> NoteFields:
    """Returns an object with the field `orcinus`, which says whether the values of the answers
    match their schemas and which keywords are not enforced. `verdicts` has one item for each
    answer. If any item is False, the values do not match. Otherwise, if any item is None, the field
    does not say whether the values match. Returns an empty object if the field would be empty."""
    note: OrcinusNote = {}
    verdict = verdict_of(verdicts)
    if verdict is not None:
        note["schema_valid"] = verdict
    if unenforced:
        note["unenforced"] = list(unenforced)
    return {"orcinus": note} if note else {}
