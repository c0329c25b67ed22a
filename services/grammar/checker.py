"""A process that finds out whether grammars can be followed: `python -m services.grammar.checker`.

llguidance limits its own work, but not all of it: intersections of regular expressions take
unbounded processor time and memory, and long chains of rules overflow the stack. So each grammar is
compiled in a child process that is forked for it, and whose processor time, memory and stack the
kernel limits. A bad grammar can harm only that child.

The first line of the input is JSON that names the model; each further line is a grammar as JSON.
For each line there is one line of output, also JSON: null, or the reason why the grammar cannot be
followed. The process ends with its input. It must have only one thread, so that it can fork.
"""

import json
import os
import resource
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from services.grammar.grammars import Grammars, InvalidGrammar

COMPILE_S = 0.1
"""Seconds of processor time for compiling a grammar and its first two masks. The schemas of 60
tools, with 60,000 characters, take a quarter of this limit. A rank, and with it all requests of a
batch, may have to wait for this time."""

COMPILE_BYTES = 48 * 2**20
"""Memory in bytes for compiling a grammar, in addition to the vocabulary. Most grammars take less
than 16 MiB. The limit is a part of `GRAMMARS_BYTES` in the settings of a frontend."""

STACK_BYTES = 4 * 2**20
"""Stack size in bytes for compiling a grammar; ranks have more (`grammars.STACK_BYTES`)."""

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
    """The model whose grammars are checked."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def to_json(self) -> str:
        """Returns the first line of input for the process."""
        return json.dumps(asdict(self))


def main() -> None:
    """Reads the model, then one grammar after the other, and writes an answer for each line."""
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
        _answer(reason_against(grammars, json.loads(line)))


def reason_against(grammars: Grammars, grammar: str, *, compile_s: float = COMPILE_S) -> str | None:
    """Returns the reason why a grammar cannot be followed; None if the grammar can be followed.

    A child process compiles the grammar, in at most `compile_s` seconds of processor time.

    Raises:
        ChildProcessError: the child process ended for another reason.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        _check(grammars, grammar, compile_s, sending)
    os.close(sending)
    with open(receiving, encoding="utf-8") as verdict:
        reason = verdict.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code and code not in _REASONS:
        raise ChildProcessError(f"the child that compiles a grammar ended with {code}")
    return _REASONS.get(code) or reason or None


def _check(grammars: Grammars, grammar: str, compile_s: float, sending: int) -> None:
    """Compiles a grammar within the limits, writes the reason why it cannot be followed, and ends
    the process."""
    code = _PANIC  # the status if Rust panics
    try:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()
        )  # the runtime of Rust writes to it
        _limit(resource.RLIMIT_AS, _address_space() + COMPILE_BYTES)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        signal.setitimer(signal.ITIMER_PROF, compile_s)
        reason = ""
        try:
            grammars.check(grammar)
        except MemoryError:
            reason = TOO_LARGE
        except (InvalidGrammar, ValueError) as error:  # ValueError: the text is not Unicode
            reason = str(error)[:MAX_REASON_LENGTH] or "it is wrong"
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(sending, reason.encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _limit(kind: int, value: int) -> None:
    """Lowers a resource limit of this process, unless the limit is lower already."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _answer(reason: str | None) -> None:
    sys.stdout.write(json.dumps(reason) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
