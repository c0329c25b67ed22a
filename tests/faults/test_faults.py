"""Streams survive whatever is done to the processes that serve them: nothing is lost, nothing
changes, nothing comes twice.

    make test-faults FAULTS_N=200 FAULTS_SEED=7
    FAULTS_KINDS=kill FAULTS_PHASES=decode FAULTS_STREAMS=16 make test-faults FAULTS_N=20
    FAULTS_SPARES=0 make test-faults FAULTS_N=200    # without the spares of one pipeline

Faults, their order and the requests follow from the seed; what the machine makes of them does not.
"""

import asyncio
import os
import time
from pathlib import Path
from random import Random, SystemRandom

import pytest

from tests.faults import report as reports
from tests.faults.checker import check
from tests.faults.client import Clients, Log
from tests.faults.crowd import MAX_PAUSE_S, Crowd, answers_of
from tests.faults.nemesis import ALL_KINDS, PHASES, Nemesis, NoRecovery, draw_faults
from tests.faults.report import Run
from tests.faults.tree import Shape, Tree, growing
from tests.faults.workload import Question, draw_questions
from tests.system.conftest import write_model
from tests.system.stack import ROOT

N_FAULTS = int(os.environ.get("FAULTS_N") or 8)
SEED = int(os.environ.get("FAULTS_SEED") or SystemRandom().randrange(10**6))
OUT = Path(os.environ.get("FAULTS_OUT") or ROOT / "build" / "faults.json")

N_SPARES = int(os.environ.get("FAULTS_SPARES") or 1)
N_STREAMS = int(os.environ.get("FAULTS_STREAMS") or 64)


def _listed(variable: str) -> list[str]:
    return list(filter(None, os.environ.get(variable, "").split(",")))


KINDS, DRAWN_PHASES = _listed("FAULTS_KINDS") or ALL_KINDS, _listed("FAULTS_PHASES") or PHASES
"""Kinds and phases of the faults, separated by commas in the variables; all when not set."""

FINISH_S = 180.0
"""Seconds for the requests that still run when the last fault is over."""


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
        faults = draw_faults(random, N_FAULTS, tree.shape, kinds=KINDS, phases=DRAWN_PHASES)
        await nemesis.run(faults, tell=lambda line: print(line, flush=True))
    except (NoRecovery, OSError) as error:
        print(f"no recovery: {error}\n{''.join(tree.stack.output[-50:])}", flush=True)
    crowd.is_over = True
    await asyncio.wait(asking, timeout=FINISH_S)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return Run(
        seed=SEED,
        injected=nemesis.injected,
        events=log.events,
        violations=check(log.events, crowd.expected(expected), max_pause_s=MAX_PAUSE_S),
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
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            Shape(n_pipelines=1, n_stages=2, tp_size=2, n_spares=N_SPARES), id="1-pipeline"
        ),
        pytest.param(Shape(n_pipelines=2, n_stages=2, tp_size=1), id="2-pipelines"),
    ],
)
async def test_no_stream_is_lost_or_changed(tmp_path: Path, shape: Shape) -> None:
    print(f"\nseed {SEED}: FAULTS_SEED={SEED} FAULTS_N={N_FAULTS} repeats it", flush=True)
    model = write_model(tmp_path, num_hidden_layers=4)
    with growing(model, shape, tmp_path) as tree:
        clients = Clients(tree.stack.http, tree.stack.grpc, Log())
        try:
            run = await disturbed(tree, clients, draw_questions(Random(SEED), N_STREAMS))
        finally:
            await clients.close()
    report = reports.summary(run)
    reports.write(report, OUT.with_stem(f"{OUT.stem}-{shape.n_pipelines}"))
    print(reports.table(report), flush=True)
    for violation in run.violations[:20]:
        print(violation, flush=True)
    assert run.n_recovered == N_FAULTS
    assert not run.violations
    assert not run.leftovers
    assert run.epochs == sorted(run.epochs)
    assert run.epochs[-1] > run.epochs[0]
