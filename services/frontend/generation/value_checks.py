"""Checks finished values of answers against JSON schemas that the grammar enforces only in part.

A value is the content of an answer whose format has such a schema, or the arguments of a call of a
tool with such a schema. The text of an answer is kept until the answer ends, and then read as a
whole. Nothing is changed in the answer: its last piece says whether the values match.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from services.frontend.generation.answer import Piece
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.request.conversation import Conversation
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.text.message_reader import MessageDelta, MessageReader

CheckValue = Callable[[ClientSchema, str], Awaitable[bool | None]]
"""Type of a function that returns whether a text is JSON that matches a schema. The function
returns None if the check was not possible within the limits."""

KEPT_BYTES = 4
"""Largest number of bytes of memory that one character of kept text takes."""


class ValueChecks:
    """Checks the values in the answers of one call: contents and tool arguments that must match a
    JSON schema."""

    def __init__(
        self,
        check: CheckValue,
        prompts: Sequence[EncodedPrompt],
        schema: ClientSchema | None,
        *,
        keep: Callable[[int], None],
        note: Callable[[bool | None], None],
    ) -> None:
        """`schema` is the schema of the requested format, if there is one. `keep` is called with a
        number of bytes to count memory for kept text. `note` is called with the result for each
        answer that has values to check."""
        self._check = check
        self._prompts = prompts
        must_call = any(prompt.answer_format.must_call for prompt in prompts)
        self._schema = None if must_call or schema is None or not schema.unenforced else schema
        self._keep = keep
        self._note = note
        self._texts: dict[int, list[str]] = {}

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Names of the JSON-schema keywords that the grammar does not enforce."""
        names = () if self._schema is None else self._schema.unenforced_names
        found = dict.fromkeys(names)
        for prompt in self._prompts:
            for schema in prompt.answer_format.schemas.values():
                found.update(dict.fromkeys(schema.unenforced_names))
        return tuple(found)

    def add(self, index: int, text: str) -> None:
        """Keeps new text of an answer, because the whole text is checked when the answer ends."""
        self._keep(KEPT_BYTES * len(text))
        self._texts.setdefault(index, []).append(text)

    async def checked(self, piece: Piece, prompt: EncodedPrompt) -> Piece:
        """Returns `piece`, the next piece of an answer to `prompt`. If it is the last piece, the
        returned piece also says whether the values of the answer match their schemas."""
        self.add(piece.index, piece.text)
        if piece.finish_reason is None:
            return piece
        text = "".join(self._texts.pop(piece.index))
        verdicts = [await self._check(*value) for value in self._values(text, prompt)]
        if not verdicts:
            return piece
        verdict = verdict_of(verdicts)
        self._note(verdict)
        return replace(piece, schema_valid=verdict)

    def _values(self, text: str, prompt: EncodedPrompt) -> Iterator[tuple[ClientSchema, str]]:
        """Yields the values in the text of an answer, each with its schema."""
        content, calls = text, MessageDelta().tool_calls
        if isinstance(prompt.prompt, Conversation):
            reader = prompt.answer_format.reader("", 0)
            message = reader.feed(text) + reader.flush()
            content, calls = message.content, message.tool_calls
        for call in calls:
            if (schema := prompt.answer_format.schemas.get(call.name)) is not None:
                yield schema, call.arguments
        if self._schema is not None and not calls:
            yield self._schema, content


def verdict_of(verdicts: Iterable[bool | None]) -> bool | None:
    """Returns whether several values all match their schemas: False if one does not match. Returns
    None if none is known not to match, but one could not be checked."""
    found = set(verdicts)
    if False in found:
        return False
    return None if None in found else True


def checks_of(
    check: CheckValue | None,
    prompts: Sequence[EncodedPrompt],
    schema: ClientSchema | None,
    *,
    keep: Callable[[int], None],
    note: Callable[[bool | None], None],
) -> ValueChecks | None:
    """Returns the checks of a call. Returns None if there is no `check`, or if the grammars enforce
    all schemas completely. `ValueChecks` describes the arguments."""
    if check is None:
        return None
    checks = ValueChecks(check, prompts, schema, keep=keep, note=note)
    return checks if checks.unenforced else None


class RecordingReader:
    """A message reader that passes each text to another reader, and also keeps the text for
    `checks`."""

    def __init__(self, reader: MessageReader, checks: ValueChecks, index: int) -> None:
        self._reader = reader
        self._checks = checks
        self._index = index

    @property
    def n_tool_calls(self) -> int:
        """Number of tool calls that have begun."""
        return self._reader.n_tool_calls

    @property
    def ends_in_call(self) -> bool:
        """Whether the text that has been read ends inside the arguments of a call."""
        return self._reader.ends_in_call

    def leave_out(self, n_characters: int) -> None:
        """Notes that the model has written `n_characters` characters that this reader does not
        get."""
        self._reader.leave_out(n_characters)

    def feed(self, text: str) -> MessageDelta:
        """Takes new text and returns what the text adds to the message."""
        self._checks.add(self._index, text)
        return self._reader.feed(text)

    def flush(self) -> MessageDelta:
        """Ends the text and returns the part of the message that had been held back."""
        return self._reader.flush()
