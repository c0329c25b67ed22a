"""`orcinus chat`: a conversation with a model on a terminal.

Each answer is printed while it is generated. Ctrl-C ends an answer; the part that was received
stays in the conversation.
"""

import argparse
import readline
import signal
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.local_system import DoesNotServe
from services.cli.target import Target, add_options, opened, parsed
from services.common.ending import give_up, print_error
from services.common.http_api import ApiError

PROMPT = "> "
HELP = """\
/reset   forget the conversation
/quit    end, as Ctrl-D does
Ctrl-C   end an answer"""
MAX_HISTORY = 1000

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer, or a piece of the reasoning that precedes an answer.

    Reasoning is not kept in the conversation.
    """

    text: str
    is_reasoning: bool = False


class ChatSession:
    """A conversation with a model: keeps the messages so far, and streams the next answer."""

    def __init__(self, target: Target, *, system: str | None, options: dict[str, Any]) -> None:
        self._target = target
        self._options = options
        self._beginning: list[Message] = []
        if system is not None:
            self._beginning.append({"role": "system", "content": system})
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all messages except the system message."""
        self.messages = list(self._beginning)

    def say(self, text: str) -> Generator[AnswerPart]:
        """Sends a message of the user, and yields the pieces of the answer.

        If the caller stops reading before the end, only the part of the answer that was read stays
        in the conversation. If the call fails, the user's message is removed from the conversation.

        Raises:
            ApiError: the server refuses the call, or the connection is lost.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._pieces():
                answer += "" if piece.is_reasoning else piece.text
                yield piece
        except ApiError:
            self.messages.pop()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user" and answer:
                self.messages.append({"role": "assistant", "content": answer})

    def _pieces(self) -> Generator[AnswerPart]:
        body = {
            "model": self._target.model,
            "messages": self.messages,
            "stream": True,
            **self._options,
        }
        with self._target.api.events("/v1/chat/completions", body) as events:
            for event in events:
                if error := event.get("error"):
                    raise ApiError(str(error.get("message", error)))
                for choice in event.get("choices", ()):
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning_content"):
                        yield AnswerPart(thought, is_reasoning=True)
                    if text := delta.get("content"):
                        yield AnswerPart(text)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="orcinus chat", description="Chats with a model on the terminal."
    )
    add_options(made)
    made.add_argument("--system", metavar="TEXT", help="what the conversation begins with")
    made.add_argument("--max-tokens", type=int, help="tokens of an answer at most")
    made.add_argument("--temperature", type=float)
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs a conversation until the end of the input. Returns the exit status."""
    options, rest = parsed(parser(), arguments)
    given = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    try:
        with opened(options, rest) as target:
            fields = {name: value for name, value in given.items() if value is not None}
            _talk(ChatSession(target, system=options.system, options=fields), target)
    except (ApiError, DoesNotServe, ValueError) as error:
        return give_up(error, ready_fd=None)
    return 0


def _talk(conversation: ChatSession, target: Target) -> None:
    # A shell makes background commands ignore SIGINT; with this handler, SIGINT ends an answer.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    readline.set_history_length(MAX_HISTORY)
    if sys.stdin.isatty():
        _write(f"{target.model}\n{HELP}\n\n")
    while (text := _read()) is not None:
        match text.strip():
            case "":
                pass
            case "/quit":
                return
            case "/reset":
                conversation.reset()
                _write("The conversation is forgotten.\n")
            case "/help":
                _write(f"{HELP}\n")
            case command if command.startswith("/"):
                print_error(f"there is no command {command.split()[0]}; /help lists them")
            case said:
                _answer(conversation, said)


def _read() -> str | None:
    """Returns the next line of the input. Returns None at the end of the input."""
    while True:
        try:
            return input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            _write("\n/quit, or Ctrl-D, ends the conversation.\n")


def _answer(conversation: ChatSession, text: str) -> None:
    pieces = conversation.say(text)
    try:
        for piece in pieces:
            is_dim = piece.is_reasoning and sys.stdout.isatty()
            _write(f"\x1b[2m{piece.text}\x1b[0m" if is_dim else piece.text)
    except KeyboardInterrupt:
        _write(" …")
    except ApiError as error:
        print_error(str(error))
    finally:
        pieces.close()  # ends the call to the server, if the answer is not complete
    _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
