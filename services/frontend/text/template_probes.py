"""Finds out, by short conversations, in which form a chat template takes turns.

A template is a program: whether it takes a list of parts, or shows the result of a tool, is known
only when it runs. Each probe renders conversations whose texts are words that no template contains,
and looks for the words in what the template writes.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from services.frontend.request.conversation import ChatMessage, EarlierCall, Tool
from services.frontend.text.template_form import TemplateForm
from services.frontend.text.template_program import TEMPLATE_ERRORS, TemplateProgram
from services.frontend.text.template_sandbox import Meter, TooMuch

log = logging.getLogger(__name__)

PROBE_S = 1.0
"""Seconds of processor time that one probe may take. After a slower probe no further probe runs.
The templates of known models take 2 ms. The limit is much higher because a pause of the garbage
collector may add a tenth of a second, which must not change how a template is used."""

MAX_CHARACTERS = 256 * 2**10
"""Largest number of characters that a template may write for a probe."""

_ASKS, _SAYS, _FIRST, _LATER, _ADDS = "qvasks", "qvsays", "qvfirst", "qvlater", "qvadds"
_ROLE = "qvrole"
_RESULTS = ("qvanswer", "qvreply")
_NAMES = ("qvfind", "qvdive")
_VALUES = ("qvplace", "qvdepth")
_ARGUMENTS = tuple({"qvkey": value} for value in _VALUES)

_TOOLS = tuple(
    Tool(
        name=name,
        description="Looks.",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {"qvkey": {"type": "string", "description": "What."}},
                "required": ["qvkey"],
            }
        ),
    )
    for name in _NAMES
)
_CALLS = tuple(
    EarlierCall(f"call0000{number}", name, json.dumps(arguments))
    for number, (name, arguments) in enumerate(zip(_NAMES, _ARGUMENTS, strict=True))
)
_USER = ChatMessage("user", _ASKS)


def _calling(n_calls: int, content: str | None = None) -> tuple[ChatMessage, ...]:
    """Returns a conversation with a turn of `n_calls` tool calls, followed by the results of the
    calls."""
    calls = _CALLS[:n_calls]
    results = (
        ChatMessage("tool", result, name=call.name, tool_call_id=call.id)
        for call, result in zip(calls, _RESULTS, strict=False)
    )
    return _USER, ChatMessage("assistant", content, tool_calls=calls), *results


class TemplateProbes:
    """Finds out the form in which one template takes turns and tools, by probes: renderings of
    short conversations."""

    def __init__(self, source: str, program: TemplateProgram, *, has_tools: bool) -> None:
        """`has_tools` says whether the conversations of the probes have tools."""
        self.form = TemplateForm.of_source(source)
        """The form of the template, as far as the probes have found it."""
        self._program = program
        self._tools = _TOOLS if has_tools else ()

    def run(self) -> TemplateForm:
        """Runs all probes and returns the form of the template. If the template takes too long or
        writes too much, returns what has been found so far."""
        try:
            self._find_tools()
            self._find_contents()
            self._find_arguments()
            self._find_tool_results()
            self._find_parallel_calls()
            self._find_reasoning()
            self._find_content_beside_calls()
            self._find_systems()
            self._find_other_roles()
            self._find_descriptions()
        except TooMuch as error:
            log.warning("the chat template is taken as it is: in a short conversation, %s", error)
        return self.form

    def _find_tools(self) -> None:
        """Finds out whether the template refuses all tools. If so, the other probes run without
        tools, because with tools they would show nothing but this refusal."""
        parts = replace(self.form, part_roles=frozenset(["user"]))
        if all(self._text(form, (_USER,)) is None for form in (self.form, parts)):
            self._tools = ()

    def _find_contents(self) -> None:
        """Finds out, for all roles except tools, in which form the template takes the content. If
        the content of the role `developer` does not appear, the template does not know this
        role."""
        says = ChatMessage("assistant", _SAYS)
        self._find_content("user", _ASKS, (_USER,))
        self._find_content("assistant", _SAYS, (_USER, says, _USER))
        system, developer = ((ChatMessage(role, _FIRST), _USER) for role in ("system", "developer"))
        self._find_content("system", _FIRST, system)
        self._find_left_out("system", _FIRST, system)
        if self.form.knows_developers:
            self._find_content("developer", _FIRST, developer)
            shown = self._shows(self.form, developer, _FIRST)
            self.form = replace(self.form, knows_developers=shown)

    def _find_content(self, role: str, word: str, messages: Sequence[ChatMessage]) -> None:
        """Finds out whether the template takes the content of a role as a list of parts. `word` is
        a word of the content."""
        form = replace(self.form, part_roles=self.form.part_roles | {role})
        if not self._shows(self.form, messages, word) and self._shows(form, messages, word):
            self.form = form

    def _find_left_out(self, role: str, word: str, messages: Sequence[ChatMessage]) -> None:
        """Finds out whether the template accepts messages of a role but leaves out their text.
        `word` is a word of that text."""
        text = self._text(self.form, messages)
        if text is not None and word not in text:
            self.form = replace(self.form, left_out_roles=self.form.left_out_roles | {role})

    def _find_arguments(self) -> None:
        """Finds the form of calls that the template shows best: the first form with which both the
        name and the arguments appear, else the first with the name, else the first without an
        error."""
        forms = [
            replace(self.form, has_null_content=is_null, has_text_arguments=is_text)
            for is_null, is_text in product((True, False), (False, True))
        ]
        plain = self._text(self.form, (_USER,)) or ""
        usual = replace(self.form, has_null_content=False)
        for words in ((_NAMES[0], _VALUES[0]), (_NAMES[0],), ()):
            for form in forms:
                text = self._text(form, _calling(1))
                if text is None or str(_ARGUMENTS[0]) in text:
                    continue
                if text.count("None") > plain.count("None"):
                    continue
                if all(text.count(word) > plain.count(word) for word in words):
                    self.form = form
                    return
        self.form = usual

    def _find_tool_results(self) -> None:
        messages, word = _calling(1), _RESULTS[0]
        self._find_content("tool", word, messages)
        self._find_left_out("tool", word, messages)
        is_taken = bool(self._tools) and self._shows(self.form, messages, word)
        self.form = replace(self.form, takes_tool_results=is_taken)

    def _find_parallel_calls(self) -> None:
        """Finds out whether the template shows several calls in a turn: the second of two calls
        must appear as completely as a single call does. If the name, or the arguments, of a single
        call do not appear, they need not appear for the second call either."""
        plain, one, two = (
            self._text(self.form, messages) or ""
            for messages in ((_USER,), _calling(1), _calling(2))
        )
        shown = [
            two.count(second) > plain.count(second)
            for first, second in (_NAMES, _VALUES)
            if one.count(first) > plain.count(first)
        ]
        self.form = replace(self.form, has_parallel_calls=all(shown))

    def _find_reasoning(self) -> None:
        user, turn, *results = _calling(1, _SAYS)
        messages = (user, replace(turn, reasoning_content=_ADDS), *results)
        form = replace(self.form, has_reasoning_beside_content=False)
        if self._text(self.form, messages) is None and self._shows(form, messages, _ADDS, _SAYS):
            self.form = form

    def _find_content_beside_calls(self) -> None:
        text = self._text(self.form, _calling(1, _SAYS))
        if text is not None and _SAYS not in text:
            self.form = replace(self.form, shows_content_beside_calls=False)

    def _find_systems(self) -> None:
        first, later = ChatMessage("system", _FIRST), ChatMessage("system", _LATER)
        form = replace(self.form, has_late_systems=False)
        for messages in ((first, _USER, later), (first, later, _USER)):
            if not self._shows(self.form, messages, _FIRST, _LATER) and self._shows(
                form, messages, _FIRST, _LATER
            ):
                self.form = form
                return

    def _find_other_roles(self) -> None:
        """Finds out whether the template accepts messages of a role that it does not name, but
        leaves out their text."""
        text = self._text(self.form, (_USER, ChatMessage(_ROLE, _ADDS), _USER))
        if text is not None and _ADDS not in text:
            self.form = replace(self.form, shows_any_role=False)

    def _find_descriptions(self) -> None:
        tools = [replace(tool, description="") for tool in self._tools]
        form = replace(self.form, has_tools_without_description=False)
        if self._text(self.form, (_USER,), tools) is None and self._text(form, (_USER,), tools):
            self.form = form

    def _shows(self, form: TemplateForm, messages: Sequence[ChatMessage], *words: str) -> bool:
        text = self._text(form, messages)
        return text is not None and all(word in text for word in words)

    def _text(
        self, form: TemplateForm, messages: Sequence[ChatMessage], tools: Iterable[Tool] = ()
    ) -> str | None:
        """Returns the text that the template writes for messages. Returns None if the template
        refuses them.

        Raises:
            TooMuch: the template takes too long or writes too much.
        """
        given = [form.tool(tool) for tool in tools or self._tools]
        variables = {
            "documents": None,
            "messages": replace(form, left_out_roles=frozenset(), shows_any_role=True).turns(
                messages
            ),
            "tools": given or None,
            "add_generation_prompt": True,
        }
        try:
            return self._program.run(
                variables, Meter(limit_s=PROBE_S, max_characters=MAX_CHARACTERS)
            )
        except TooMuch:
            raise
        except TEMPLATE_ERRORS:
            return None
