"""Grammars are compiled beside the event loop before their requests are sent on."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.common import errors
from services.frontend.request import output_format
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.pipeline import Pipeline
from services.frontend.request.refusals import Refusals
from services.frontend.text.grammar_check import MAX_VERDICTS, GrammarCheck
from services.frontend.text.text_threads import TextThreads
from tests.frontend.conftest import soon

TOKENIZER = Path("models/demo/tokenizer.json")
DEMO = Pipeline(
    model="m", vocab_size=4096, max_model_len=128, eos_token_ids=(0,), can_follow_grammars=True
)


class Checks:
    """A check, the memory that it may take, and how often it has compiled."""

    def __init__(self, tokenizer_file: Path | None = TOKENIZER) -> None:
        self.refusals = Refusals()
        self.budget = MemoryBudget(2**20, refusals=self.refusals)
        self.threads = CountingThreads(self.refusals)
        self.check = GrammarCheck(tokenizer_file, self.threads)

    async def __call__(self, grammar: str, pipeline: Pipeline = DEMO) -> None:
        with self.budget.share() as share:
            await soon(self.check.check("regex", grammar, pipeline, share))


class CountingThreads(TextThreads):
    """Threads that count what they are given."""

    n_runs = 0

    async def run(self, work, share: Share, **cost):  # type: ignore[no-untyped-def]
        self.n_runs += 1
        return await super().run(work, share, **cost)


async def test_a_verdict_is_kept() -> None:
    check = Checks()
    wrong = output_format.regex("(")
    for _ in range(3):
        await check("start: /a/")
        with pytest.raises(errors.InvalidRequest, match="cannot be followed") as caught:
            await check(wrong)
        assert caught.value.field == "regex"
        assert len(str(caught.value)) < 520
    assert check.threads.n_runs == 2
    assert check.budget.n_bytes == 0


async def test_verdicts_are_those_of_one_model_and_bounded() -> None:
    check = Checks()
    await check("start: /a/")
    await check("start: /a/", replace(DEMO, eos_token_ids=(0, 1)))
    assert check.threads.n_runs == 2
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
    tokenizer_file: Path | None, pipeline: Pipeline
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
    grammars = ["x: " + f'"{number}"' * 10_000 for number in range(20)]
    outcomes = await soon(asyncio.gather(*map(check, grammars), return_exceptions=True))
    assert any(isinstance(outcome, errors.PoolFull) for outcome in outcomes)
