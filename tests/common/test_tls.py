"""TLS and roles, with real handshakes."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orcinus.v1 import scheduler_pb2, worker_pb2

from services.common import rpc, rpc_handlers, tls
from services.common.health import LIVENESS, Health
from services.scheduler import service as scheduler_service
from services.scheduler.watching import watch_service
from services.worker.controller import service as worker_service
from tests.certificates import Authority, Pem, mount, serial_number_at

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
SCHEDULER_SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
LIMIT_S = 30.0
ROLES = (tls.FRONTEND, tls.SCHEDULER, tls.WORKER)


class Worker:
    """A servicer with a method of each kind, that does nothing but be called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        self.calls.append("Describe")
        return worker_pb2.DescribeResponse()

    async def AssignStage(self, request: Any, context: Any) -> worker_pb2.AssignStageResponse:
        self.calls.append("AssignStage")
        return worker_pb2.AssignStageResponse()

    async def JoinPipeline(self, request: Any, context: Any) -> worker_pb2.JoinPipelineResponse:
        self.calls.append("JoinPipeline")
        return worker_pb2.JoinPipelineResponse()

    async def RunIterations(self, context: Any) -> bytes:
        self.calls.append("RunIterations")
        while await context.read() is not grpc.aio.EOF:
            pass
        return b""

    async def PrepareGrammar(self, request: Any, context: Any) -> worker_pb2.PrepareGrammarResponse:
        self.calls.append("PrepareGrammar")
        return worker_pb2.PrepareGrammarResponse()

    async def WatchStage(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.calls.append("WatchStage")
        yield b""

    async def Profile(self, request: Any, context: Any) -> worker_pb2.ProfileResponse:
        self.calls.append("Profile")
        return worker_pb2.ProfileResponse()


class Scheduler:
    """A servicer of the scheduler, whose frontends send and get streams."""

    async def Connect(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)


class Watch:
    """A servicer of watches."""

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def directory_of(authority: Authority, directory: Path, *names: str) -> Path:
    """A new mounted directory with a certificate for names."""
    authority.mount(directory, *names)
    return directory


@pytest.fixture
def worker_dir(authority: Authority, tmp_path: Path) -> Path:
    return directory_of(authority, tmp_path / "worker", tls.WORKER)


@contextlib.asynccontextmanager
async def serving(tls_dir: Path | None, worker: Worker | None = None) -> AsyncIterator[str]:
    """A worker's port, as a worker makes it."""
    async with served(
        rpc_handlers.service_handler(
            WORKER_SERVICE,
            worker or Worker(),
            raw=worker_service.RAW_METHODS,
            callers=tls.callers(tls_dir, worker_service.CALLERS),
        ),
        tls.server_credentials(tls_dir),
    ) as address:
        yield address


@contextlib.asynccontextmanager
async def served(
    handler: grpc.GenericRpcHandler, credentials: grpc.ServerCredentials | None
) -> AsyncIterator[str]:
    server = rpc.create_server()
    server.add_generic_rpc_handlers((handler,))
    address = rpc.bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=0)


async def describe(connect: rpc.Connect, address: str) -> grpc.StatusCode:
    """Returns the status of a first call on a new channel."""
    async with connect(address) as channel:
        return await status_of(channel.unary_unary(rpc.method_path(WORKER_SERVICE, "Describe")))


async def status_of(method: Any, data: bytes = b"") -> grpc.StatusCode:
    try:
        await method(data, timeout=LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def shown_by(address: str, own: Path | None = None) -> int:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if own is not None:
        context.load_cert_chain(own / "tls.crt", own / "tls.key")
    return await asyncio.to_thread(serial_number_at, address, context)


# Who gets in


async def test_the_right_role_is_served(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = directory_of(authority, tmp_path / "own", tls.SCHEDULER)
    async with serving(worker_dir) as address:
        assert await describe(tls.connector(own, role=tls.WORKER), address) is grpc.StatusCode.OK


async def test_a_plaintext_client_is_refused(worker_dir: Path) -> None:
    async with serving(worker_dir) as address:
        assert await describe(rpc.connect, address) is grpc.StatusCode.UNAVAILABLE


async def test_a_client_without_a_certificate_is_refused(
    authority: Authority, worker_dir: Path
) -> None:
    def connect(address: str, options: rpc.Options = ()) -> grpc.aio.Channel:
        return rpc.connect(
            address,
            (("grpc.ssl_target_name_override", tls.WORKER),),
            credentials=grpc.ssl_channel_credentials(authority.certificate),
        )

    worker = Worker()
    async with serving(worker_dir, worker) as address:
        assert await describe(connect, address) is grpc.StatusCode.UNAVAILABLE
    assert not worker.calls


async def test_a_client_of_another_authority_is_refused(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    stranger = Authority("another").issue(tls.SCHEDULER)
    files = {"tls.crt": stranger.certificate, "tls.key": stranger.key}
    mount(own, {**files, "ca.crt": authority.certificate})
    worker = Worker()
    async with serving(worker_dir, worker) as address:
        status = await describe(tls.connector(own, role=tls.WORKER), address)
        assert status is grpc.StatusCode.UNAVAILABLE
    assert not worker.calls


async def test_a_server_of_another_authority_is_not_trusted(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = directory_of(Authority("another"), tmp_path / "own", tls.SCHEDULER)
    async with serving(worker_dir) as address:
        status = await describe(tls.connector(own, role=tls.WORKER), address)
        assert status is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("names", [(tls.SCHEDULER,), ("127.0.0.1",)], ids=["role", "address"])
async def test_a_server_that_has_not_the_role_is_not_trusted(
    authority: Authority, tmp_path: Path, names: tuple[str, ...]
) -> None:
    own = directory_of(authority, tmp_path / "own", tls.SCHEDULER)
    theirs = directory_of(authority, tmp_path / "theirs", *names)
    async with serving(theirs) as address:
        status = await describe(tls.connector(own, role=tls.WORKER), address)
        assert status is grpc.StatusCode.UNAVAILABLE


async def test_nothing_is_encrypted_or_checked_without_a_directory() -> None:
    async with serving(None) as address:
        assert await describe(tls.connector(None, role=tls.WORKER), address) is grpc.StatusCode.OK
    assert tls.connector(None, role=tls.WORKER) is rpc.connect


async def test_a_connector_keeps_this_projects_limits_and_takes_options(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = directory_of(authority, tmp_path / "own", tls.SCHEDULER)
    connect = tls.connector(own, role=tls.WORKER)
    path = rpc.method_path(WORKER_SERVICE, "Describe")
    large = worker_pb2.JoinPipelineRequest(members=["x" * (6 * 2**20)])  # gRPC's own limit is 4 MiB
    data = large.SerializeToString()
    async with serving(worker_dir) as address:
        async with connect(address) as channel:
            assert await status_of(channel.unary_unary(path), data) is grpc.StatusCode.OK
        async with connect(address, (("grpc.max_send_message_length", 2**20),)) as channel:
            status = await status_of(channel.unary_unary(path), data)
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED


# Who may call what


async def call_all(channel: Any, service: ServiceDescriptor) -> dict[str, grpc.StatusCode]:
    """Calls every method of a service; how each call ends."""
    statuses = {}
    for method in service.methods:
        path = rpc.method_path(service, method.name)
        match method.client_streaming, method.server_streaming:
            case False, False:
                call = channel.unary_unary(path)(b"", timeout=LIMIT_S)
            case False, True:
                call = channel.unary_stream(path)(b"", timeout=LIMIT_S)
            case True, False:
                call = channel.stream_unary(path)(iter([b""]), timeout=LIMIT_S)
            case _:
                call = channel.stream_stream(path)(iter([b""]), timeout=LIMIT_S)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await _last_of(call) if method.server_streaming else await call
        statuses[method.name] = await call.code()
    return statuses


async def _last_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("caller", [*ROLES, "orcinus-other"])
@pytest.mark.parametrize("called", [tls.WORKER, tls.SCHEDULER, "watch"])
async def test_each_role_may_call_what_its_table_says_and_nothing_else(
    authority: Authority, tmp_path: Path, called: str, caller: str
) -> None:
    descriptor, servicer, table, raw = {
        tls.WORKER: (WORKER_SERVICE, Worker(), worker_service.CALLERS, worker_service.RAW_METHODS),
        tls.SCHEDULER: (
            SCHEDULER_SERVICE,
            Scheduler(),
            scheduler_service.CALLERS,
            ("Connect",),
        ),
        "watch": (watch_service.SERVICE, Watch(), watch_service.CALLERS, ("Watch",)),
    }[called]
    called = tls.WORKER if called == tls.WORKER else tls.SCHEDULER
    own = directory_of(authority, tmp_path / "own", caller)
    theirs = directory_of(authority, tmp_path / "theirs", called)
    handler = rpc_handlers.service_handler(
        descriptor, servicer, raw=raw, callers=tls.callers(theirs, table)
    )
    async with (
        served(handler, tls.server_credentials(theirs)) as address,
        tls.connector(own, role=called)(address) as channel,
    ):
        statuses = await call_all(channel, descriptor)
    assert statuses == {
        name: grpc.StatusCode.OK if caller in callers else grpc.StatusCode.PERMISSION_DENIED
        for name, callers in table.items()
    }


async def test_a_refusal_names_the_method_and_the_caller(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = directory_of(authority, tmp_path / "own", tls.FRONTEND, "somewhere.svc")
    async with (
        serving(worker_dir) as address,
        tls.connector(own, role=tls.WORKER)(address) as channel,
    ):
        method: Any = channel.unary_unary(rpc.method_path(WORKER_SERVICE, "JoinPipeline"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", timeout=LIMIT_S)
    assert caught.value.details() == (
        "orcinus.v1.WorkerService/JoinPipeline is for orcinus-scheduler, "
        "not for orcinus-frontend, somewhere.svc"
    )


async def test_a_table_is_kept_even_if_the_port_has_no_tls() -> None:
    handler = rpc_handlers.service_handler(
        WORKER_SERVICE,
        Worker(),
        raw=worker_service.RAW_METHODS,
        callers=worker_service.CALLERS,
    )
    async with served(handler, None) as address:
        assert await describe(rpc.connect, address) is grpc.StatusCode.PERMISSION_DENIED


def test_a_table_must_have_every_method() -> None:
    with pytest.raises(KeyError, match="AssignStage"):
        rpc_handlers.service_handler(
            WORKER_SERVICE, Worker(), callers={"Describe": {tls.SCHEDULER}}
        )


async def test_the_port_for_probes_stays_without_tls(worker_dir: Path) -> None:
    health = Health("orcinus.v1.WorkerService")
    await health.start()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    async with serving(worker_dir):
        server = await health.listen(address)
        assert server is not None
        async with rpc.connect(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=LIVENESS)
            answer = await stub.Check(request, timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.stop(grace=0)


# Renewal


async def test_a_renewed_certificate_is_for_new_connections_and_old_ones_go_on(
    authority: Authority, worker_dir: Path, tmp_path: Path
) -> None:
    own = directory_of(authority, tmp_path / "own", tls.SCHEDULER)
    connect = tls.connector(own, role=tls.WORKER)
    path = rpc.method_path(WORKER_SERVICE, "Describe")
    async with serving(worker_dir) as address, connect(address) as channel:
        assert await status_of(channel.unary_unary(path)) is grpc.StatusCode.OK
        renewed = authority.mount(worker_dir, tls.WORKER)
        assert await shown_by(address, own) == renewed.serial_number
        again = authority.mount(worker_dir, tls.WORKER)
        assert await shown_by(address, own) == again.serial_number
        assert await status_of(channel.unary_unary(path)) is grpc.StatusCode.OK
        assert await describe(connect, address) is grpc.StatusCode.OK


async def test_another_authority_is_trusted_once_it_is_mounted(tmp_path: Path) -> None:
    first, second = Authority("first"), Authority("second")
    own = directory_of(first, tmp_path / "own", tls.SCHEDULER)
    theirs = directory_of(first, tmp_path / "theirs", tls.WORKER)
    connect = tls.connector(own, role=tls.WORKER)
    async with serving(theirs) as address:
        assert await describe(connect, address) is grpc.StatusCode.OK
        second.mount(theirs, tls.WORKER)
        assert await describe(connect, address) is grpc.StatusCode.UNAVAILABLE
        second.mount(own, tls.SCHEDULER)
        assert await describe(connect, address) is grpc.StatusCode.OK


def without_key(authority: Authority, good: Pem) -> dict[str, bytes]:
    return {"tls.crt": good.certificate, "ca.crt": authority.certificate}


def with_garbage(authority: Authority, good: Pem) -> dict[str, bytes]:
    return {**without_key(authority, good), "tls.key": b"not a key"}


def with_the_old_key(authority: Authority, good: Pem) -> dict[str, bytes]:
    key = authority.issue(tls.WORKER).key
    return {**without_key(authority, good), "tls.key": key}


def half_written(authority: Authority, good: Pem) -> dict[str, bytes]:
    half = good.certificate[: len(good.certificate) // 2]
    return {"tls.crt": half, "tls.key": good.key, "ca.crt": authority.certificate}


def without_authority(authority: Authority, good: Pem) -> dict[str, bytes]:
    return {"tls.crt": good.certificate, "tls.key": good.key, "ca.crt": b""}


BROKEN = [without_key, with_garbage, with_the_old_key, half_written, without_authority]


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda breakage: breakage.__name__)
async def test_a_broken_renewal_leaves_both_sides_what_they_had(
    authority: Authority, tmp_path: Path, breakage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    client_files = authority.mount(own, tls.SCHEDULER)
    old = authority.mount(theirs, tls.WORKER)
    connect = tls.connector(own, role=tls.WORKER)
    kept = tmp_path / "kept"
    mount(kept, {"tls.crt": client_files.certificate, "tls.key": client_files.key})
    async with serving(theirs) as address:
        for directory in (own, theirs):
            mount(directory, breakage(authority, authority.issue(tls.WORKER)))
        for _ in range(2):
            assert await shown_by(address, kept) == old.serial_number
            assert await describe(connect, address) is grpc.StatusCode.OK
        complaints = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(complaints) == 2, complaints
        assert all(any(str(d) in message for message in complaints) for d in (own, theirs))
        renewed = authority.mount(theirs, tls.WORKER)
        assert await shown_by(address, kept) == renewed.serial_number


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda breakage: breakage.__name__)
def test_broken_files_at_the_start_are_named(
    authority: Authority, tmp_path: Path, breakage: Any
) -> None:
    directory = tmp_path / "tls"
    mount(directory, breakage(authority, authority.issue(tls.WORKER)))
    name = "ca.crt" if breakage is without_authority else "tls.key"
    for make in (tls.server_credentials, lambda path: tls.connector(path, role=tls.WORKER)):
        with pytest.raises(OSError, match=f"{tmp_path}.*{name}"):
            make(directory)


def test_a_key_with_a_password_is_refused_without_asking(
    authority: Authority, tmp_path: Path
) -> None:
    pem = authority.issue(tls.WORKER, password=b"secret")
    mount(tmp_path / "tls", {"tls.crt": pem.certificate, "tls.key": pem.key})
    with pytest.raises(OSError, match="the key is encrypted"):
        tls.server_context(tmp_path / "tls")


def test_plain_files_do_as_well_as_mounted_ones(authority: Authority, tmp_path: Path) -> None:
    pem = authority.issue(tls.WORKER)
    (tmp_path / "tls.crt").write_bytes(pem.certificate)
    (tmp_path / "tls.key").write_bytes(pem.key)
    assert tls.server_credentials(tmp_path, require_client_certificate=False) is not None
    with pytest.raises(OSError, match=r"ca\.crt"):
        tls.server_credentials(tmp_path)


async def test_a_public_port_shows_its_certificate_and_asks_for_none(
    authority: Authority, tmp_path: Path
) -> None:
    public = tmp_path / "public"
    pem = authority.issue("api.example.org")
    mount(public, {"tls.crt": pem.certificate, "tls.key": pem.key})
    handler = rpc_handlers.service_handler(WORKER_SERVICE, Worker(), raw=worker_service.RAW_METHODS)
    credentials = tls.server_credentials(public, require_client_certificate=False)
    async with served(handler, credentials) as address:
        assert await shown_by(address) == pem.serial_number
        renewed = authority.issue("api.example.org")
        mount(public, {"tls.crt": renewed.certificate, "tls.key": renewed.key})
        assert await shown_by(address) == renewed.serial_number


def test_tables_name_known_roles_only() -> None:
    tables: list[Mapping[str, Any]] = [worker_service.CALLERS, scheduler_service.CALLERS]
    for table in tables:
        assert set().union(*table.values()) <= set(ROLES)
