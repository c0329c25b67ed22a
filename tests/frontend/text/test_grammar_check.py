"""Grammars are compiled beside the event loop before their requests are sent on."""

import asyncio
import gc
import os
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common import errors
from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.refusals import Refusals
from services.frontend.text import grammar_checker as checker
from services.frontend.text.grammar_check import MAX_VERDICTS, MAX_WAITING, GrammarCheck
from tests.frontend.conftest import soon
from tests.limits import HANG_S

TOKENIZER = Path("models/demo/tokenizer.json")
DEMO = ServedPipeline(
    model="m", vocab_size=4096, max_model_len=128, eos_token_ids=(0,), can_follow_grammars=True
)


class Checks:
    """A check, and the memory that it may take."""

    def __init__(self, tokenizer_file: Path | None = TOKENIZER) -> None:
        self.refusals = Refusals()
        self.budget = MemoryBudget(2**20, refusals=self.refusals)
        self.check = GrammarCheck(tokenizer_file, self.refusals)

    async def __call__(self, grammar: str, pipeline: ServedPipeline = DEMO) -> None:
        with self.budget.share() as share:
            await soon(self.check.check("regex", grammar, pipeline, share))

    @property
    def verdicts(self) -> list[str]:
        return list(self.check._verdicts.values())


def checkers() -> list[psutil.Process]:
    """Returns the processes that check grammars, the newest last.

    Those of earlier tests may end meanwhile.
    """
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time", "ppid"])
        if process.info["ppid"] == os.getpid()
        and "services.frontend.text.grammar_checker" in (process.info["cmdline"] or ())
    ]
    return sorted(found, key=lambda process: float(process.info["create_time"]))


def intersection(n: int) -> str:
    """Returns the grammar of texts that match so many patterns, in the work of 2^n states."""
    schema = {"type": "string", "allOf": [{"pattern": f".*[a-z]{i}.*"} for i in range(n)]}
    return output_format.json_schema(ClientSchema(schema, "schema"))


def chain(n: int) -> str:
    """Returns the grammar of a text behind a chain of so many rules."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(n))
    return f'start: r0\n{rules}\nr{n}: "a"'


async def test_a_verdict_is_kept() -> None:
    check = Checks()
    wrong = output_format.regex("(")
    for _ in range(3):
        await check("start: /a/")
        with pytest.raises(errors.InvalidRequest, match="cannot be followed") as caught:
            await check(wrong)
        assert caught.value.field == "regex"
        assert len(str(caught.value)) < 520
    assert check.verdicts[0] == ""
    assert len(check.verdicts) == 2
    assert check.budget.n_bytes == 0


async def test_verdicts_are_those_of_one_model_and_bounded() -> None:
    check = Checks()
    await check("start: /a/")
    await check("start: /a/", replace(DEMO, eos_token_ids=(0, 1)))
    assert len(check.verdicts) == 1
    for number in range(MAX_VERDICTS):
        check.check._keep(number.to_bytes(4), "")
    assert len(check.check._verdicts) == MAX_VERDICTS


@pytest.mark.parametrize(
    ("tokenizer_file", "pipeline"),
    [
        (TOKENIZER, replace(DEMO, can_follow_grammars=False)),
        (None, DEMO),
        (Path("models/demo/config.json"), DEMO),
    ],
    ids=["ranks", "no tokenizer", "broken tokenizer"],
)
async def test_a_model_that_can_follow_none_says_so(
    tokenizer_file: Path | None, pipeline: ServedPipeline
) -> None:
    with pytest.raises(errors.InvalidRequest, match="can follow no format") as caught:
        await Checks(tokenizer_file)("start: /a/", pipeline)
    assert caught.value.field == "regex"


async def test_callers_that_leave_do_not_pile_up_work() -> None:
    check = Checks()
    busy = asyncio.ensure_future(check(output_format.choice(["x" * 40] * 1000)))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(check(f"start: /{number}/" * 2000)) for number in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await soon(busy)
    await check("start: /a/")
    assert check.budget.n_bytes == 0


async def test_too_many_at_once_are_refused() -> None:
    check = Checks()
    calls = [asyncio.ensure_future(check(f'start: "{n}"')) for n in range(MAX_WAITING + 20)]
    refused, waiting = await soon(asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION))
    assert all(isinstance(call.exception(), errors.PoolFull) for call in refused)
    assert 0 < len(refused) <= 20
    for call in waiting:
        call.cancel()
    await soon(asyncio.gather(*waiting, return_exceptions=True))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (intersection(20), re.escape(checker.TOO_SLOW)),
        # A processor that is fast enough comes as far as a limit of the library's.
        ("start: " + " ".join(['"a"?'] * 4900), f"{re.escape(checker.TOO_SLOW)}|Too many items"),
        (chain(2000), re.escape(checker.TOO_DEEP)),
        ('start: "\ud800"', "not JSON serializable"),
    ],
    ids=["an intersection", "options", "a chain of rules", "no Unicode"],
)
async def test_what_a_grammar_does_it_does_to_a_process_of_its_own(
    grammar: str, reason: str
) -> None:
    check = Checks()
    await check("start: /a/")
    process = checkers()[-1]
    with pytest.raises(errors.InvalidRequest, match=reason):
        await check(grammar)
    await check("start: /ab/")
    assert process.is_running()
    assert not process.children()


async def test_a_process_that_is_gone_is_replaced_and_leaves_no_verdict() -> None:
    check = Checks()
    await check("start: /a/")
    process = checkers()[-1]
    process.kill()
    process.wait(timeout=HANG_S)
    with pytest.raises(errors.PoolFull):
        await check("start: /ab/")
    assert check.verdicts == [""]
    await check("start: /ab/")
    assert check.budget.n_bytes == 0


async def test_the_process_ends_with_its_check() -> None:
    check = Checks()
    await check("start: /a/")
    process = checkers()[-1]
    del check
    gc.collect()
    assert not process.is_running()
