"""Renders a conversation as one text, by the chat template of the checkpoint.

Templates are Jinja programs made for the `transformers` library. They get the conversation as plain
dictionaries.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import rfc8785

from services.common import errors
from services.common.gguf.header import is_gguf
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.text.template_files import (
    DEFAULT,
    GGUF_TEMPLATE,
    WITH_TOOLS,
    TemplateFiles,
)
from services.frontend.text.template_form import TemplateForm
from services.frontend.text.template_probes import TemplateProbes
from services.frontend.text.template_program import TEMPLATE_ERRORS, TemplateProgram
from services.frontend.text.template_sandbox import Meter, TooMuch


class ChatTemplate:
    """Renders conversations by the chat template of one checkpoint."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` is a separate template for conversations with tools, if the checkpoint has
        one."""
        self._parts = {"source": source, "tools": tool_source, "tokens": dict(special_tokens or {})}
        self.source = tool_source or source
        """Source of the template for conversations with tools."""
        tokens = special_tokens or {}
        plain = with_tools = TemplateProgram(source, tokens)
        if tool_source is not None:
            with_tools = TemplateProgram(tool_source, tokens)
        self._plain = _FittedTemplate(plain, TemplateProbes(source, plain, has_tools=False).run())
        self._with_tools = _FittedTemplate(
            with_tools, TemplateProbes(self.source, with_tools, has_tools=True).run()
        )

    @classmethod
    def from_model(cls, model: Path) -> Self | None:
        """Returns the template of a checkpoint's directory or of a GGUF file. Returns None if there
        is none.

        Raises:
            OSError: the file cannot be read.
            ValueError: the template, or the file that may contain it, is broken.
        """
        if not is_gguf(model):
            return cls.from_directory(model)
        files = TemplateFiles.of_gguf(model)
        return cls._from_files(files, name=f"{model}: {GGUF_TEMPLATE}")

    @classmethod
    def from_directory(cls, directory: Path) -> Self | None:
        """Returns the template in a checkpoint's directory. Returns None if there is none.

        Raises:
            OSError: a file cannot be read.
            ValueError: the template, or the configuration that may contain it, is broken.
        """
        name = f"the chat template or tokenizer_config.json in {directory}"
        try:
            files = TemplateFiles.of_directory(directory)
        except (LookupError, TypeError, ValueError) as error:
            raise _broken(name, error) from error
        return cls._from_files(files, name=name)

    @classmethod
    def _from_files(cls, files: TemplateFiles, *, name: str) -> Self | None:
        """Returns the template in the files of a checkpoint. Returns None if there is none. Error
        messages call the template `name`."""
        if DEFAULT not in files.sources:
            return None
        try:
            return cls(
                files.sources[DEFAULT],
                special_tokens=files.special_tokens,
                tool_source=files.sources.get(WITH_TOOLS),
            )
        except (*TEMPLATE_ERRORS, SyntaxError) as error:
            # Python, to which Jinja compiles, refuses loops or brackets that nest too deeply.
            raise _broken(name, error) from error

    @property
    def digest(self) -> str:
        """SHA-256 of the templates and of the texts of the special tokens that they use."""
        return hashlib.sha256(rfc8785.dumps(self._parts)).hexdigest()

    @property
    def renders_parallel_calls(self) -> bool:
        """Whether the template can show several calls in one turn."""
        return self._with_tools.form.has_parallel_calls

    @property
    def takes_tool_results(self) -> bool:
        """Whether the template can show the results of tools."""
        return self._with_tools.form.takes_tool_results

    def render(self, conversation: Conversation, *, limit_s: float, max_characters: int) -> str:
        """Returns the text of a conversation, up to the place where the answer begins. This is the
        beginning of a new turn of the assistant or, with `continues_last`, the end of the last
        turn.

        Raises:
            TooMuch: the text would have more than `max_characters` characters.
            TooSlow: rendering took more than `limit_s` seconds of processor time.
            InvalidRequest: the template refuses the conversation, leaves out messages, or leaves
            out the content that the answer should continue.
        """
        meter = Meter(limit_s=limit_s, max_characters=max_characters)
        if not _shows_tools(conversation):
            conversation = replace(conversation, tools=())
        return self._for(conversation).render(conversation, meter)

    def left_out(self, conversation: Conversation) -> tuple[str, ...]:
        """Returns the names of fields of the conversation whose values the template leaves out of
        the prompt."""
        return self._for(conversation).form.left_out(conversation.messages)

    def _for(self, conversation: Conversation) -> "_FittedTemplate":
        return self._with_tools if _shows_tools(conversation) else self._plain


@dataclass(frozen=True, slots=True)
class _FittedTemplate:
    """Renders conversations by one template, in the form in which this template takes turns and
    tools."""

    program: TemplateProgram
    form: TemplateForm

    def render(self, conversation: Conversation, meter: Meter) -> str:
        """Returns the text of a conversation and its tools. Raises the errors of
        `ChatTemplate.render`."""
        tag = _new_tag() if conversation.continues_last else ""
        messages = _tagged(conversation, tag) if tag else conversation.messages
        variables = {
            "documents": None,
            **conversation.template_kwargs,
            "messages": self.form.turns(messages, continues_last=conversation.continues_last),
            "tools": [self.form.tool(tool) for tool in conversation.tools] or None,
            "add_generation_prompt": conversation.adds_generation_prompt,
        }
        try:
            text = self.program.run(variables, meter)
        except TooMuch:
            raise
        except TEMPLATE_ERRORS as error:
            raise errors.InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        return _cut(text, tag) if tag else text


def _shows_tools(conversation: Conversation) -> bool:
    """Returns whether the template gets the tools of a conversation."""
    return conversation.tool_choice.mode != "none" and bool(conversation.tools)


def _tagged(conversation: Conversation, tag: str) -> tuple[ChatMessage, ...]:
    """Returns the messages, with `tag` added at the end of the last message's content. If that
    content is blank, no tag is added."""
    *others, last = conversation.messages
    content = last.content or ""
    return (*others, replace(last, content=content + tag) if content.strip() else last)


def _broken(name: str, error: Exception) -> ValueError:
    explanation = " ".join(str(error).split())  # Jinja's have several lines
    return ValueError(f"{name} is broken: {explanation}")


def _new_tag() -> str:
    """Returns a random tag. A tag is put at the end of a message's content, to find this end in the
    rendered text. The tag consists of digits, which templates do not change, and a space, which is
    missing in the rendered text if the template strips contents."""
    return f"{secrets.randbelow(10**18):018} "


def _cut(text: str, tag: str) -> str:
    """Returns the part of `text` before `tag`, the text that `_tagged` has put at the end of the
    last content. If the template has stripped the white space of the tag, the white space at the
    end of the result is stripped too.

    Raises:
        InvalidRequest: the text does not contain the tag.
    """
    at = text.rfind(tag.rstrip())
    if at < 0:
        raise errors.InvalidRequest(
            "continue_final_message", "needs a last message whose content the template shows"
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()
