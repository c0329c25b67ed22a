"""Compiles and follows grammars that are nested as deeply as their length allows. This runs in a
process of its own, since a stack overflow ends the process.

Each grammar is checked as frontends do, and those that pass are followed as ranks do, with a small
stack. The name of each and how it went are printed.
"""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase

from services.frontend.request import output_format
from services.frontend.text.grammar_checker import reason_against
from services.grammar.grammars import Grammars, Matcher
from tests.grammar.compiled import matcher_of

VOCAB_SIZE, EOS = 4096, 1
STEP_STACK_BYTES = 256 * 2**10
COMPILE_S = 10.0
"""Processor time to compile a grammar, which none needs: only the stack and memory are tried."""

N_STEPS = 20
N_RULES = 1000


def name(number: int) -> str:
    """Returns one of many short names."""
    first, second, third = number % 26, number // 26 % 26, number // 676
    return ascii_lowercase[first] + ascii_lowercase[second] + ascii_lowercase[third]


def chain(n: int, *, opening: str = "", closing: str = "", mark: str = ":") -> str:
    """Returns `n` rules, each of which refers to the next one, within brackets."""
    rules = (f"{name(i)}{mark}{opening}{name(i + 1)}{closing}" for i in range(n))
    return "\n".join([f"start{mark}{name(0)}", *rules, f'{name(n)}{mark}"b"'])


def references(n: int, *, opening: str, closing: str) -> str:
    """Returns a schema with `n` definitions, each of which refers to the next one from inside other
    schemas."""
    definitions = ",".join(
        f'"{name(i)}":{opening}{{"$ref":"#/$defs/{name(i + 1)}"}}{closing}' for i in range(n)
    )
    return f'{{"$ref":"#/$defs/{name(0)}","$defs":{{{definitions},"{name(n)}":{{}}}}}}'


def grammars() -> Iterator[tuple[str, str]]:
    """Yields names and grammars, each about as long as a grammar may be, or as deep as its reader
    takes it."""
    n_brackets = (output_format.MAX_LENGTH // N_RULES - 9) // 2
    yield "chain", chain(output_format.MAX_LENGTH // 8 - 4)
    yield f"{N_RULES} rules", chain(N_RULES)
    for depth in (n_brackets, 24, 8):
        deep = chain(N_RULES, opening="(" * depth, closing=")" * depth)
        yield f"{depth} brackets", deep
        yield f"{depth} brackets of terminals", deep.upper().replace("START", "start")
    yield "nested", "start: " + "(" * 32_000 + '"a"' + ")" * 32_000
    yield "expression", output_format.regex("(" * 32_000 + "a" + ")" * 32_000)
    escaped = json.dumps("\n".join(["start:aaa", chain(6900)]))
    yield "chain in JSON", f'{{"grammars":[{{"lark_grammar":{escaped}}}]}}'
    for n, opening, closing in (
        (1400, "", ""),
        (1000, '{"anyOf":[' * 3, "]}" * 3),
        (240, '{"anyOf":[' * 20, "]}" * 20),
        (1000, '{"items":' * 3, "}" * 3),
        (280, '{"items":' * 20, "}" * 20),
    ):
        yield f"{n} references", "start: %json " + references(n, opening=opening, closing=closing)
    yield "nested schema", '{"grammars":[{"json_schema":' + '{"items":' * 6000 + "}" * 6000 + "}]}"
    n_translated = output_format.MAX_GBNF_RULES - 2
    yield "GBNF", output_format.grammar(chain(n_translated, mark=" ::= ").replace("start", "root"))


def follow(matcher: Matcher) -> None:
    """Takes the first token that may come, again and again."""
    for _ in range(N_STEPS):
        mask = int.from_bytes(matcher.mask(), "little")
        token_id = (mask & -mask).bit_length() - 1
        if token_id == EOS:
            return
        matcher.take(token_id)


def main(tokenizer_file: str) -> None:
    """Checks all grammars, and follows the grammars that pass the check."""
    grammars_of_model = Grammars(Path(tokenizer_file), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    passed: list[tuple[str, str]] = []
    for title, grammar in grammars():
        if len(grammar) > output_format.MAX_LENGTH:
            raise AssertionError(f"{title} is longer than a grammar may be")
        reason = reason_against(grammars_of_model, grammar, compile_s=COMPILE_S)
        if reason is None:
            passed.append((title, grammar))
        else:
            print(f"{title}: refused: {reason[:60]!r}", flush=True)  # noqa: T201
    for title, grammar in passed:  # there are threads from here on, and no child can be forked
        threading.stack_size(STEP_STACK_BYTES)
        thread = threading.Thread(target=follow, args=(matcher_of(grammars_of_model, grammar),))
        thread.start()
        threading.stack_size(0)
        thread.join()
        print(f"{title}: followed", flush=True)  # noqa: T201
    print("alive", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
