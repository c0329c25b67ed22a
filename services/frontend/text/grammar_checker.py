"""A process that finds out whether grammars can be followed, and whether values match JSON schemas:
`python -m services.frontend.text.grammar_checker`.

llguidance limits its own work, but not all of it: intersections of regular expressions take
unbounded processor time and memory, and long chains of rules overflow the stack. So each grammar is
compiled in a forked child process, and the kernel limits the processor time, memory and stack of
the child. A bad grammar can harm only that child. Values are checked in such children too.

The first line of the input is JSON that names the model. Each further line is a grammar, as a JSON
text, or a pair of a schema and a value. For each line there is one line of output, also JSON. For
the model and for a grammar it is null, or the reason why the grammar cannot be followed. For a pair
it says whether the value matches, or is null if the check was not possible within the limits. The
process ends with its input. It must have only one thread, because it forks.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.frontend.text import value_checker
from services.grammar.grammars import Grammars

COMPILE_S = 0.1
"""Seconds of processor time for compiling a grammar of up to `SHORT_LENGTH` characters and for its
first two token masks. Most grammars take a hundredth of this limit. The ranks compile the grammar
again; meanwhile the request, and requests with later grammars, wait."""

SHORT_LENGTH = 2**14
"""Length of a grammar, in characters, above which its time limit grows with its length. The schemas
of many tools make such long grammars: 200 tools with 500,000 characters take a sixth of their
limit. These schemas are part of the prompt too, so the answer begins only after seconds anyway."""

COMPILE_BYTES = 128 * 2**20
"""Largest memory in bytes for compiling a grammar or checking a value, in addition to the
vocabulary. Most grammars take less than 16 MiB; the schemas of 200 tools, with 500,000 characters,
take 94 MiB. The limit is a part of `GRAMMARS_BYTES` in the settings of a frontend."""

VALUE_S = 0.1
"""Seconds of processor time for checking a value. Most checks take less than a hundredth of this
limit."""

STACK_BYTES = 4 * 2**20
"""Stack size in bytes for compiling a grammar. The ranks have a larger stack
(`compile_thread.STACK_BYTES`)."""

MAX_REASON_LENGTH = 500
"""Largest number of characters of the reason why a grammar cannot be followed."""

TOO_SLOW = "takes too much processor time to compile"
TOO_LARGE = "takes too much memory to compile"
TOO_DEEP = "is nested too deeply, or a chain of too many rules"

TOO_STRANGE = "cannot be compiled"

_PANIC = 1
_REASONS = {
    _PANIC: TOO_STRANGE,
    -signal.SIGPROF: TOO_SLOW,
    -signal.SIGABRT: TOO_LARGE,  # the signal with which Rust ends if an allocation fails
    -signal.SIGSEGV: TOO_DEEP,
    -signal.SIGBUS: TOO_DEEP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The model for which grammars are checked."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def to_json(self) -> str:
        """Returns the model as JSON, for the first line of the input of `main`."""
        return json.dumps(asdict(self))


def main() -> None:
    """Reads the model, then one grammar or value after the other, and writes an answer for each
    line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the frontend
    model = CheckedModel(**json.loads(sys.stdin.readline()))
    try:
        grammars = Grammars(
            Path(model.tokenizer_file),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
    except ValueError as error:
        _answer(str(error)[:MAX_REASON_LENGTH])
        return
    _answer(None)
    for line in sys.stdin:
        match json.loads(line):
            case str() as grammar:
                _answer(reason_against(grammars, grammar))
            case [schema, value]:
                _answer(is_valid(schema, value))


def reason_against(
    grammars: Grammars, grammar: str, *, compile_s: float | None = None
) -> str | None:
    """Returns the reason why a grammar cannot be followed. Returns None if the grammar can be
    followed.

    A child process compiles the grammar, in at most `compile_s` seconds of processor time.

    Raises:
        ChildProcessError: the child process ended for a reason other than a limit.
    """
    if compile_s is None:
        compile_s = COMPILE_S * max(1.0, len(grammar) / SHORT_LENGTH)

    def compiled() -> str:
        grammars.check(grammar)  # InvalidGrammar is a ValueError
        return ""

    code, reason = _in_child(compiled, compile_s)
    return _REASONS.get(code) or reason or None


def is_valid(schema: str, value: str, *, value_s: float = VALUE_S) -> bool | None:
    """Returns whether a text is JSON that matches a schema. Returns None if the schema is wrong, or
    the check exceeds a limit. A child process does the check, in at most `value_s` seconds of
    processor time.

    Raises:
        ChildProcessError: the child process ended for a reason other than a limit.
    """
    code, verdict = _in_child(lambda: str(value_checker.is_valid(schema, value)), value_s)
    return {"True": True, "False": False}.get(verdict) if code == 0 else None


def _in_child(work: Callable[[], str], limit_s: float) -> tuple[int, str]:
    """Calls `work` in a child process, with at most `limit_s` seconds of processor time. Returns
    the exit status of the child and the text that `work` returned.

    Raises:
        ChildProcessError: the child process ended for a reason other than a limit.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        _do(work, limit_s, sending)
    os.close(sending)
    with open(receiving, encoding="utf-8") as text:
        returned = text.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code and code not in _REASONS:
        raise ChildProcessError(f"the child that checks a grammar or a value ended with {code}")
    return code, returned


def _do(work: Callable[[], str], limit_s: float, sending: int) -> None:
    """Calls `work` within the limits, writes the text that it returns to the file descriptor
    `sending`, and ends this process."""
    code = _PANIC  # the status if Rust panics
    try:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
        )  # the runtime of Rust writes to it
        _limit(resource.RLIMIT_AS, _address_space() + COMPILE_BYTES)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            returned = work()
        except MemoryError:
            returned = TOO_LARGE
        except ValueError as error:  # the text is not Unicode, or a schema is wrong
            returned = str(error)[:MAX_REASON_LENGTH] or "it is wrong"
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(sending, returned.encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _limit(kind: int, value: int) -> None:
    """Lowers a resource limit of this process, unless the limit is lower already."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _answer(verdict: str | bool | None) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
