"""Made-up messages for every RPC of the frontend's port: the public API, health and reflection."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2
from orcinus.v1 import inference_pb2

from services.frontend.grpc import reflection
from tests.fuzz import rounds
from tests.fuzz.calls import BUGS, Call, answer_of, call_of
from tests.fuzz.choices import Choices, examples
from tests.fuzz.conftest import System
from tests.fuzz.hints import INFERENCE
from tests.fuzz.rounds import Inputs

OURS = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
METHODS = [
    *OURS,
    *health_pb2.DESCRIPTOR.services_by_name["Health"].methods,
    *(method for version in reflection.SERVICES for method in version.methods),
]
ENDLESS = {"Watch"}


def call(choices: Choices) -> Call:
    """Returns a call of any method; seven in eight are of our own service."""
    method = choices.one_of(METHODS if choices.one_in(8) else OURS)
    return call_of(choices, method, INFERENCE)


@pytest.fixture
def channel(unharmed: System) -> Iterator[grpc.Channel]:
    """A connection to the frontend of a system that must not be harmed."""
    with grpc.insecure_channel(unharmed.stack.grpc) as channel:
        yield channel


def test_no_call_of_the_public_port_fails_by_a_bug_or_hangs(channel: grpc.Channel) -> None:
    inputs = Inputs("public gRPC", share=0.3)

    def check(made: Call) -> None:
        code = answer_of(channel, made, is_endless=made.method.name in ENDLESS)
        inputs.add(len(made.requests), code.name)
        assert code not in BUGS

    rounds.run(check, examples(call), inputs)
