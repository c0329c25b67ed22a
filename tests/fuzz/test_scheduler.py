"""Made-up messages for every RPC of the scheduler: streams of frontends, and watchers."""

from collections.abc import Iterator

import grpc
import pytest
from orcinus.v1 import scheduler_pb2, watch_pb2

from tests.fuzz import rounds
from tests.fuzz.calls import BUGS, Call, answer_of, call_of
from tests.fuzz.choices import Choices, examples
from tests.fuzz.conftest import System
from tests.fuzz.hints import SCHEDULER
from tests.fuzz.rounds import Inputs

CONNECT = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name["Connect"]
WATCH = watch_pb2.DESCRIPTOR.services_by_name["WatchService"].methods_by_name["Watch"]
ENDLESS = {"Watch"}


def call(choices: Choices) -> Call:
    """Returns a call: mostly a stream of a frontend, which ends when all is sent."""
    method = WATCH if choices.one_in(32) else CONNECT
    return call_of(choices, method, SCHEDULER, n_most=12)


@pytest.fixture
def channel(unharmed: System) -> Iterator[grpc.Channel]:
    """A connection to the scheduler of a system that must not be harmed."""
    with grpc.insecure_channel(unharmed.stack.scheduler_address()) as channel:
        yield channel


def test_no_message_to_the_scheduler_ends_it_or_stays_in_its_pool(channel: grpc.Channel) -> None:
    inputs = Inputs("scheduler", share=0.2)

    def check(made: Call) -> None:
        code = answer_of(channel, made, is_endless=made.method.name in ENDLESS)
        inputs.add(len(made.requests), code.name)
        assert code not in BUGS

    rounds.run(check, examples(call), inputs)
