"""The options of gRPC that the limits rest on: an option that it does not know has no effect.

Where one of these tests fails after an upgrade, look for the new name of the option, run
`make test-hostile`, and only then name the new version in `requirements/common.in`.
"""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.common import rpc

ROOT = Path(__file__).parents[2]

OPTIONS = dict(
    [
        *rpc.SERVER_OPTIONS,
        *rpc.PROBE_SERVER_OPTIONS,
        *rpc.RECONNECT_OPTIONS,
        *rpc.public_server_options(
            max_connections=1, head_limit_s=1.0, idle_limit_s=1.0, silence_limit_s=1.0
        ),
    ]
)


@pytest.fixture(scope="module")
def library() -> bytes:
    found = find_spec("grpc._cython.cygrpc")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_bytes()


def test_grpcio_is_the_version_whose_behaviour_was_measured() -> None:
    required = (ROOT / "requirements" / "common.in").read_text()
    assert re.search(rf"^grpcio=={re.escape(version('grpcio'))} ", required, re.MULTILINE)
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(rf"^grpcio=={re.escape(version('grpcio'))}$", constraints, re.MULTILINE)


@pytest.mark.parametrize("name", OPTIONS)
def test_grpc_knows_each_option_that_is_set(name: str, library: bytes) -> None:
    assert name.encode() in library


def test_a_name_that_grpc_does_not_know_is_noticed(library: bytes) -> None:
    assert b"grpc.http2.bdp_probes" not in library
