"""Starts and calls a separate process, which checks the grammars of clients by compiling them, and
checks values against the schemas of clients.

The process runs `services.frontend.text.grammar_checker`. The process is started when the first
grammar or value is to be checked, and again after it has ended or has not answered in time. The
process holds the vocabulary of the model in memory, so that the frontend need not hold it.
"""

import json
import socket
import subprocess
import sys
import time
import weakref
from typing import Any

from services.frontend.text.grammar_checker import CheckedModel

START_LIMIT_S = 30.0
"""Seconds within which the process must have read the tokenizer. On an idle machine this takes 0.3
s."""

CHECK_LIMIT_S = 10.0
"""Seconds within which the process must answer about a grammar. The processor time of the check has
a separate limit, which is far lower."""


class NoAnswer(Exception):
    """Raised if the process has ended, or does not answer in time. The next call starts another
    process."""


class CannotFollow(Exception):
    """Raised if the model can follow no grammar: its tokenizer cannot be read, or has no token that
    ends an output."""


class GrammarProcess:
    """Starts and calls the process that checks grammars and values for one model. Only one thread
    at a time may use an object of this class."""

    def __init__(self, model: CheckedModel) -> None:
        self.model = model
        self._process: _StartedProcess | None = None

    def reason_against(self, grammar: str) -> str | None:
        """Returns the reason why a grammar cannot be followed, or None if it can be followed.

        Raises:
            CannotFollow: the model can follow no grammar.
            NoAnswer: the process gave no answer.
        """
        reason: str | None = self._ask(grammar)
        return reason

    def is_valid(self, schema: str, value: str) -> bool | None:
        """Returns whether a text is JSON that matches a schema. Returns None if the check was not
        possible within the limits.

        Raises:
            CannotFollow: the model can follow no grammar.
            NoAnswer: the process gave no answer.
        """
        verdict: bool | None = self._ask([schema, value])
        return verdict

    def _ask(self, question: object) -> Any:
        if self._process is None:
            self._process = _StartedProcess(self.model)
        try:
            return self._process.ask(json.dumps(question), limit_s=CHECK_LIMIT_S)
        except NoAnswer:
            self._process = None
            raise

    def close(self) -> None:
        """Ends the process, if it runs."""
        if self._process is not None:
            self._process.close()
            self._process = None


class _StartedProcess:
    """A process that has been started, and the pipes to and from it."""

    def __init__(self, model: CheckedModel) -> None:
        self._connection, others_end = socket.socketpair()
        with others_end:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.frontend.text.grammar_checker"],
                stdin=others_end.fileno(),
                stdout=others_end.fileno(),
            )
        self.close = weakref.finalize(self, _end, process, self._connection)
        reason = self.ask(model.to_json(), limit_s=START_LIMIT_S)
        if reason is not None:
            self.close()
            raise CannotFollow(reason)

    def ask(self, line: str, *, limit_s: float) -> Any:
        """Sends a line and returns the answer. Raises NoAnswer, and ends the process, if there is
        no answer in time."""
        ends_at = time.monotonic() + limit_s
        answer = b""
        try:
            self._connection.settimeout(limit_s)
            self._connection.sendall(line.encode() + b"\n")
            while not answer.endswith(b"\n"):
                self._connection.settimeout(max(0.001, ends_at - time.monotonic()))
                received = self._connection.recv(2**16)
                if not received:
                    raise NoAnswer("the process that checks grammars has ended")
                answer += received
        except (NoAnswer, OSError) as error:
            self.close()
            raise NoAnswer(str(error)) from error
        return json.loads(answer)


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
