"""Grammars that cost more to compile, or to follow, than to send (issue 17, structured output)."""

from collections import Counter

from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import COMPLETIONS, all_of, exchange, post
from tests.hostile.target import Target

N_FORMATS = 40


def intersection(first: int) -> dict[str, object]:
    """Returns a schema of 500 bytes whose patterns intersect in a million states."""
    patterns = [{"pattern": f".*[a-z]{number}.*"} for number in range(first, first + 20)]
    return {"type": "string", "allOf": patterns}


def chain(n_rules: int) -> str:
    """Returns a grammar whose compilation calls itself once for each rule."""
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(n_rules))
    return f'start: r0\n{rules}\nr{n_rules}: "a"'


async def endless_intersections(target: Target) -> Answers:
    """Asks for outputs of 32 schemas that llguidance would compile for ever."""
    requests = [
        post(target, COMPLETIONS, {"prompt": "a", "guided_json": intersection(number)})
        for number in range(32)
    ]
    return await all_of(exchange(target, request) for request in requests)


async def deep_chains(target: Target) -> Answers:
    """Sends grammars that would overflow the stack of the process that compiles them."""
    requests = [
        post(target, COMPLETIONS, {"prompt": "a", "guided_grammar": chain(number)})
        for number in range(3000, 3020)
    ]
    return await all_of(exchange(target, request) for request in requests)


async def many_verified_grammars(target: Target) -> Answers:
    """Has 40 grammars checked one by one, each near the limit, and then uses all at once."""

    def request(number: int, max_tokens: int) -> bytes:
        grammar = "start: " + " ".join(['"a"?'] * (1500 + number))
        body = {"prompt": "a", "max_tokens": max_tokens, "guided_grammar": grammar}
        return post(target, COMPLETIONS, body)

    answers: Answers = Counter()
    for number in range(N_FORMATS):
        answers += await all_of([exchange(target, request(number, 1))])
    return answers + await all_of(
        exchange(target, request(number, 4)) for number in range(N_FORMATS)
    )


ATTACKS = (
    Attack(
        name="endless_intersections",
        run=endless_intersections,
        answers=frozenset({"400", "429"}),
    ),
    Attack(name="deep_chains", run=deep_chains, answers=frozenset({"400", "429"})),
    Attack(
        name="many_verified_grammars",
        run=many_verified_grammars,
        answers=frozenset({"200", "400", "429"}),
        limit_s=90.0,
    ),
)
