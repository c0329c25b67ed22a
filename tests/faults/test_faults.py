"""Streams survive whatever is done to the processes that serve them: nothing is lost, nothing
changes, nothing comes twice.

    make test-faults FAULTS_N=200 FAULTS_SEED=7

Faults, their order and the requests follow from the seed; what the machine makes of them does not.
"""

import asyncio
import itertools
import os
import time
from pathlib import Path
from random import Random, SystemRandom

import pytest

from tests.faults import report as reports
from tests.faults.checker import End, Expected, StreamId, Tokens, check
from tests.faults.client import Clients, Log
from tests.faults.nemesis import Nemesis, NoRecovery, draw_faults
from tests.faults.report import Run
from tests.faults.tree import Tree, growing
from tests.faults.workload import Question, draw_questions
from tests.system.conftest import write_model
from tests.system.stack import ROOT

N_FAULTS = int(os.environ.get("FAULTS_N") or 8)
SEED = int(os.environ.get("FAULTS_SEED") or SystemRandom().randrange(10**6))
OUT = Path(os.environ.get("FAULTS_OUT") or ROOT / "build" / "faults.json")

N_STREAMS = 64
MAX_PAUSE_S = 60.0
"""Far more than a recovery takes, also where it is disturbed, and on a busy machine."""
FINISH_S = 180.0
"""Seconds for the requests that still run when the last fault is over."""


class Crowd:
    """Clients that ask one question after the other until they are told to stop."""

    def __init__(self, clients: Clients, questions: list[Question]) -> None:
        self.sent: dict[str, Question] = {}
        """The question of each request, by the request's name in the log."""
        self.is_over = False
        self._clients = clients
        self._questions = itertools.cycle(questions)

    async def ask_all_the_time(self) -> None:
        """Asks questions, one at a time."""
        while not self.is_over:
            question = next(self._questions)
            request = f"{question.name} #{len(self.sent)}"
            self.sent[request] = question
            await self._clients.ask(question, request)


async def answers_of(clients: Clients, questions: list[Question]) -> dict[StreamId, Expected]:
    """Asks each question once, and returns what came, by the question's name."""
    clients.log = log = Log()
    await asyncio.gather(*(clients.ask(question, question.name) for question in questions))
    answers = {}
    for question in questions:
        for choice in range(question.n_answers):
            stream = StreamId(question.name, choice)
            pieces = [e for e in log.events if isinstance(e, Tokens) and e.stream == stream]
            [end] = [e for e in log.events if isinstance(e, End) and e.stream == stream]
            answers[stream] = Expected(
                tuple(token for piece in pieces for token in piece.token_ids),
                "".join(piece.text for piece in pieces),
                end.reason,
            )
    assert check(log.events, answers, max_pause_s=MAX_PAUSE_S) == []
    return answers


async def disturbed(tree: Tree, clients: Clients, questions: list[Question]) -> Run:
    """Asks the questions over and over while faults are injected, and returns all that came."""
    expected = await answers_of(clients, questions)
    random = Random(SEED)
    begun_s = time.monotonic()
    clients.log = log = Log()
    crowd = Crowd(clients, questions)
    asking = [asyncio.create_task(crowd.ask_all_the_time()) for _ in range(N_STREAMS)]
    nemesis = Nemesis(tree, log, random)
    try:
        await nemesis.run(draw_faults(random, N_FAULTS), tell=lambda line: print(line, flush=True))
    except (NoRecovery, OSError) as error:
        print(f"no recovery: {error}\n{''.join(tree.stack.output[-50:])}", flush=True)
    crowd.is_over = True
    await asyncio.wait(asking, timeout=FINISH_S)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    wanted = {
        StreamId(request, choice): expected[StreamId(question.name, choice)]
        for request, question in crowd.sent.items()
        for choice in range(question.n_answers)
    }
    return Run(
        seed=SEED,
        injected=nemesis.injected,
        events=log.events,
        violations=check(log.events, wanted, max_pause_s=MAX_PAUSE_S),
        leftovers=await asyncio.to_thread(settled_leftovers, tree),
        epochs=nemesis.epochs,
        n_recovered=len(nemesis.epochs) - 1,
        n_restarts=tree.n_restarts,
        n_resumed=log.n_resumed,
        n_requests=len(crowd.sent),
        took_s=time.monotonic() - begun_s,
    )


def settled_leftovers(tree: Tree, timeout_s: float = 10.0) -> dict[str, float]:
    """Returns what is left over once nothing changes it any more."""
    deadline = time.monotonic() + timeout_s
    while (found := tree.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.mark.faults
@pytest.mark.timeout(60 + 30 * N_FAULTS + FINISH_S)
async def test_no_stream_is_lost_or_changed(tmp_path: Path) -> None:
    print(f"\nseed {SEED}: FAULTS_SEED={SEED} FAULTS_N={N_FAULTS} repeats it", flush=True)
    model = write_model(tmp_path, num_hidden_layers=4)
    with growing(model, tmp_path) as tree:
        clients = Clients(tree.stack.http, tree.stack.grpc, Log())
        try:
            run = await disturbed(tree, clients, draw_questions(Random(SEED), N_STREAMS))
        finally:
            await clients.close()
    report = reports.summary(run)
    reports.write(report, OUT)
    print(reports.table(report), flush=True)
    for violation in run.violations[:20]:
        print(violation, flush=True)
    assert run.n_recovered == N_FAULTS
    assert not run.violations
    assert not run.leftovers
    assert run.epochs == sorted(run.epochs)
    assert run.epochs[-1] > run.epochs[0]
