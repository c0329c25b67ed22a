"""Made-up messages for every RPC of a worker, in sequences, each for a controller of its own whose
rank is a fake: epochs grow only, so one message could shut out all that follow."""

import asyncio
import logging
from typing import NamedTuple

import grpc
import pytest
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from tests.fakes import fake_stage, fake_worker
from tests.fuzz import rounds
from tests.fuzz.calls import BUGS, Call, answer_of, call_of
from tests.fuzz.choices import Choices, examples
from tests.fuzz.hints import WORKER, Metadata
from tests.fuzz.rounds import Inputs
from tests.limits import HANG_S

METHODS = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods
BY_NAME = {method.name: method for method in METHODS}
ENDLESS = {"WatchStage", "Profile", "PrepareGrammar"}
"""A fake rank never writes a profile, and never compiles a grammar."""


class Sequence(NamedTuple):
    """Calls of one worker, one after the other."""

    is_free: bool
    calls: list[Call]


def sequence(choices: Choices) -> Sequence:
    """Returns calls that begin with a way into an epoch, mostly."""
    calls = [
        call_of(choices, BY_NAME[name], WORKER)
        for name in ("AssignStage", "JoinPipeline")
        if not choices.one_in(4)
    ]
    for call in choices.several(5, lambda: call_of(choices, choices.one_of(METHODS), WORKER)):
        epoch: Metadata = [("orcinus-epoch", str(choices.below(5)))]
        calls.append(call if choices.one_in(4) else call._replace(metadata=epoch))
    return Sequence(bool(choices.below(2)), calls or [call_of(choices, METHODS[0], WORKER)])


def send(made: Sequence, address: str) -> grpc.StatusCode:
    """Makes the calls, and an honest one after them, and returns how the last but that ended."""
    code = grpc.StatusCode.OK
    with grpc.insecure_channel(address) as channel:
        for call in made.calls:
            code = answer_of(channel, call, is_endless=call.method.name in ENDLESS)
            assert code not in BUGS, call
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        assert stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_S).state
    return code


def test_no_sequence_of_calls_ends_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    inputs = Inputs("worker", share=0.2)

    async def send_to_worker(made: Sequence) -> None:
        worker = fake_worker() if made.is_free else fake_stage(0, 2)
        async with worker as stage:
            code = await asyncio.to_thread(send, made, stage.address)
        inputs.add(sum(len(call.requests) for call in made.calls), code.name)

    with asyncio.Runner() as runner:
        rounds.run(lambda made: runner.run(send_to_worker(made)), examples(sequence), inputs)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
