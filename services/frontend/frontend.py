"""One frontend from start to end: both protocols in one event loop, and one stream to the
scheduler of each model.

    bind → connect → announce → serve → linger → drain

On the first signal the frontend tells clients and load balancers to use other frontends. It still
takes requests for `linger_s` seconds, in which they learn of this. Then it refuses new requests and
lets running requests finish. Requests that still run `END_S` seconds before `drain_s` is over, or
when a second signal comes, end as unavailable.

The frontend is ready while there is a pipeline of any model, and for `hold_s` seconds after a
pipeline is lost. So the frontend stays ready if another scheduler takes the lead, or a pipeline
forms again, within that time. It is also ready while a model that has ever been served is asleep or
starts.

While the frontend lingers, clients and Kubernetes get different answers about readiness. `/ready`
and the health service of the API say that the frontend is not ready, because their clients can
choose another frontend. The probe of Kubernetes reports ready as long as requests are taken:
Kubernetes itself marks the pod as terminating, and sends requests to such a pod only if no other
pod is ready.
"""

import asyncio
import contextlib
import logging

import grpc.aio
from starlette.types import ASGIApp

from services.common import address, metrics, rpc, tls, tracing
from services.common.ending import give_up
from services.common.health import Health
from services.common.process import ReadyPipe, first_of, raise_descriptor_limit, stop_event
from services.common.resident_memory import give_back_memory
from services.common.rpc_tracing import server_spans
from services.common.tracing import Tracing
from services.frontend.api_keys import ApiKeys
from services.frontend.generation.admission import Admission
from services.frontend.grpc.inference_servicer import SERVICE, InferenceServicer, add_services
from services.frontend.grpc.transfers import MAX_MESSAGE_BYTES, Transfers
from services.frontend.http.app import create_app
from services.frontend.http.bodies.unknown_fields import UnknownFields
from services.frontend.http.cross_origin import with_cors
from services.frontend.http.operations.tracing import TracedApp
from services.frontend.http.protocol.api import Api
from services.frontend.http.transport.connection_limits import ConnectionLimits, check_descriptors
from services.frontend.http.transport.request_body import BodyLimits
from services.frontend.http.transport.server import BACKLOG, HttpServer
from services.frontend.http.transport.silent_clients import notice_silence
from services.frontend.http.transport.unix_socket import bound_at, listen_unix
from services.frontend.models.served_model import ServedModel
from services.frontend.models.served_models import ServedModels
from services.frontend.observing.metrics import CountedApp, FrontendMetrics, FrontendState
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusals
from services.frontend.settings import FrontendSettings
from services.frontend.text.text_threads import TextThreads
from services.receipts.key_file import KeyFile

log = logging.getLogger(__name__)

FINISH_S = 1.0
"""Seconds after draining in which the process still sends the last errors."""

END_S = 5.0
"""Seconds at the end of `drain_s` that are kept for sending errors to requests that still run, and
for ending the process."""


async def serve(settings: FrontendSettings, traces: Tracing = tracing.OFF) -> int:
    """Runs a frontend until the process gets a signal to stop. Returns the exit status."""
    stop = stop_event()
    raise_descriptor_limit()
    try:
        check_descriptors(settings.max_connections)
        frontend = Frontend(settings, traces)
        await frontend.answer_probes()
    except (OSError, ValueError) as error:  # a file is missing or broken, or an address is taken
        return give_up(error, ready_fd=settings.ready_fd, log_format=settings.log_format)
    await frontend.run(stop)
    return 0


class Frontend:
    """Makes the parts of a frontend, such as its models and its HTTP and gRPC servers, binds the
    servers to their addresses, and runs them."""

    def __init__(self, settings: FrontendSettings, traces: Tracing = tracing.OFF) -> None:
        self._settings = settings
        self._registry = metrics.new_registry()
        self._refusals = Refusals()
        self._budget = MemoryBudget(settings.max_in_flight_bytes, refusals=self._refusals)
        self._metrics = FrontendMetrics(self._registry)
        self._admission = Admission(
            max_in_flight=settings.max_in_flight,
            max_answers_at_once=settings.max_answers_at_once,
            budget=self._budget,
            refusals=self._refusals,
        )
        threads = TextThreads(self._refusals)
        self._keys = _keys_of(settings)
        connect = tls.connector(settings.tls_dir, role=tls.SCHEDULER)
        self._models = ServedModels(
            [
                ServedModel(
                    model,
                    settings,
                    admission=self._admission,
                    threads=threads,
                    connect=connect,
                    tracer=traces.tracer,
                    metrics=self._metrics,
                    keys=self._keys,
                )
                for model in settings.models
            ],
            self._admission,
        )
        self._health = Health(SERVICE.full_name)
        self._probes: grpc.aio.Server | None = None
        self._listeners = contextlib.ExitStack()
        self.metrics_address: str | None = None
        api_keys = ApiKeys(settings.api_keys_file, refusals=self._refusals)
        self._registry.register(
            FrontendState(
                models=lambda: [model.figures for model in self._models],
                n_in_flight=lambda: self._admission.n_in_flight,
                reason_against_serving=self._models.reason_against_serving,
                refusals=self._refusals,
            )
        )
        self._http, self.http_address = self._bind_http(api_keys, traces)
        self._grpc, self.grpc_address = self._bind_grpc(api_keys, traces)

    def _bind_http(self, api_keys: ApiKeys, traces: Tracing) -> tuple[HttpServer, str]:
        """Binds the HTTP server to its address. Returns the server and the address."""
        settings = self._settings
        https = tls.server_context(settings.public_tls_dir)
        listeners = address.listen(
            settings.http_address, backlog=BACKLOG, is_shared=settings.share_ports
        )
        for listener in listeners:
            notice_silence(listener, settings.client_silence_limit_s)
        unix_listener = None
        if settings.http_socket is not None:
            unix_listener = self._listeners.enter_context(listen_unix(settings.http_socket))
        app: ASGIApp = create_app(
            Api(
                models=self._models,
                bodies=BodyLimits(
                    max_bytes=settings.max_body_bytes,
                    limit_s=settings.body_limit_s,
                    budget=self._budget,
                    refusals=self._refusals,
                ),
                api_keys=api_keys,
                comment_s=settings.comment_s,
                unknown=UnknownFields(are_refused=settings.refuse_unknown_fields),
                origins=settings.cors_origins,
                has_page=settings.page,
                registry=self._registry if settings.api_metrics else None,
                receipt_keys=self._keys,
            )
        )
        app = with_cors(app, settings.cors_origins)
        if traces.is_on:
            app = TracedApp(app, traces, is_known=api_keys.knows)
        server = HttpServer(
            CountedApp(app, self._metrics),
            listeners,
            unix_listener=unix_listener,
            tls=https,
            limits=ConnectionLimits(
                max_connections=settings.max_connections,
                max_head_bytes=settings.max_head_bytes,
                max_headers=settings.max_headers,
                head_limit_s=settings.head_limit_s,
                body_limit_s=settings.body_limit_s,
                idle_limit_s=settings.idle_limit_s,
                send_limit_s=settings.send_limit_s,
            ),
            budget=self._budget,
            refusals=self._refusals,
        )
        return server, address.bound_address(listeners, settings.http_address)

    def _bind_grpc(self, api_keys: ApiKeys, traces: Tracing) -> tuple[grpc.aio.Server, str]:
        """Binds the gRPC server to its address. Returns the server and the address."""
        settings = self._settings
        credentials = tls.server_credentials(
            settings.public_tls_dir, require_client_certificate=False
        )
        max_message_bytes = min(settings.max_body_bytes, MAX_MESSAGE_BYTES)
        server = rpc.create_server(
            [
                *rpc.public_server_options(
                    max_connections=settings.max_connections,
                    head_limit_s=settings.head_limit_s,
                    idle_limit_s=settings.idle_limit_s,
                    silence_limit_s=settings.client_silence_limit_s,
                ),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(settings.share_ports)),
                *_renewal(settings.linger_s),
            ]
        )
        servicer = InferenceServicer(
            self._models,
            max_body_bytes=max_message_bytes,
            api_keys=api_keys,
            refusals=self._refusals,
        )
        self._transfers = Transfers(
            self._budget,
            self._refusals,
            max_message_bytes=max_message_bytes,
            receive_limit_s=settings.body_limit_s,
            send_limit_s=settings.send_limit_s,
        )
        spans = None
        if traces.is_on:
            spans = server_spans(traces, is_known=api_keys.knows)
        observe = self._metrics.counted(spans)
        add_services(server, servicer, self._health, self._transfers, observe=observe)
        if (path := settings.grpc_socket) is not None:
            self._listeners.enter_context(bound_at(path, lambda: rpc.bind_unix(server, path)))
        return server, rpc.bind(server, settings.grpc_address, credentials)

    async def answer_probes(self) -> None:
        """Listens for health probes and for Prometheus, each on a separate port. If the settings
        have no address for one of the ports, it is not opened.

        Raises:
            OSError: an address is taken.
        """
        self._probes = await self._health.listen(self._settings.health_address)
        listening = metrics.listening(
            self._settings.metrics_address, self._registry, is_healthy=self._health.is_healthy
        )
        self.metrics_address = self._listeners.enter_context(listening)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set. Then still takes requests for `linger_s` seconds, and
        afterwards lets running requests finish. Ends at once if `stop` is set again."""
        await self._health.start()
        async with asyncio.TaskGroup() as tasks:
            until_refusing = (
                tasks.create_task(self._follow_readiness()),
                tasks.create_task(self._announce()),
            )
            models = tasks.create_task(self._models.run(self._health.set_giving_tokens))
            grpc_port = address.parse(self.grpc_address).port
            guarding = tasks.create_task(self._transfers.watch.run(grpc_port))
            tidying = tasks.create_task(give_back_memory())
            http = tasks.create_task(self._http.run_until_stopped())
            await self._grpc.start()
            await self._health.set_started()
            await stop.wait()
            stop.clear()
            drained_by = asyncio.get_running_loop().time() + self._settings.drain_s - END_S
            await self._linger(stop, until=drained_by)
            for task in until_refusing:
                task.cancel()
            await self._drain(stop, until=drained_by)
            await http
            models.cancel()
            guarding.cancel()
            tidying.cancel()
        if self._probes is not None:
            await self._probes.stop(None)
        self._listeners.close()

    async def wait_ready(self) -> None:
        """Waits until at least one model takes requests, even if the model must first be woken to
        answer them."""
        await self._models.wait_taking(True)

    async def _announce(self) -> None:
        """Waits until requests can be answered. Then reports to the launcher the addresses of the
        frontend and the kind of request that the first model serves."""
        await self.wait_ready()
        for model in self._models:
            defaults = str(model.defaults) or "none"
            log.info("%s: the checkpoint's own defaults: %s", model.names[0], defaults)
        log.info("serving http on %s, grpc on %s", self.http_address, self.grpc_address)
        news = {
            "task": next(iter(self._models)).service.task,
            "http": self.http_address,
            "grpc": self.grpc_address,
            "metrics": self.metrics_address,
        }
        ReadyPipe(self._settings.ready_fd).report(news)

    async def _follow_readiness(self) -> None:
        """Keeps the health service up to date with the readiness, until cancelled."""
        while True:
            await self._models.wait_taking(True)
            await self._tell_readiness()
            await self._models.wait_taking(False)
            await self._tell_readiness()

    async def _tell_readiness(self) -> None:
        await self._health.set_ready(self._models.takes_requests)
        await self._health.set_serving(self._models.is_ready)

    async def _linger(self, stop: asyncio.Event, *, until: float) -> None:
        """Tells clients and load balancers to use other frontends, and still takes requests for
        `linger_s` seconds. Stops waiting at `until`, a time of the event loop's clock, if that is
        earlier."""
        left_s = max(0.0, until - asyncio.get_running_loop().time())
        linger_s = min(self._settings.linger_s, left_s)
        log.info("stopping; requests are taken for %g s more", linger_s)
        self._admission.leave()
        self._http.leave()
        await self._tell_readiness()
        await first_of(stop.wait(), asyncio.sleep(linger_s))

    async def _drain(self, stop: asyncio.Event, *, until: float) -> None:
        """Refuses new requests and lets running requests finish until `until`, a time of the event
        loop's clock. Then ends the servers."""
        drain_s = max(0.0, until - asyncio.get_running_loop().time())
        log.info("draining; running requests have %.3g s", drain_s)
        self._admission.refuse_new()
        await self._tell_readiness()
        self._models.end_viewers()
        if self._settings.linger_s > 0:  # without it, clients learn of the end by refusals
            self._http.close_connections()
        refusing = asyncio.ensure_future(self._grpc.stop(drain_s + FINISH_S))
        await first_of(self._admission.wait_idle(), stop.wait(), asyncio.sleep(drain_s))
        self._models.close()
        self._http.stop()
        self._health.end()
        await self._grpc.stop(FINISH_S)
        await refusing


def _keys_of(settings: FrontendSettings) -> KeyFile | None:
    """Returns the keys that sign receipts, or None if no receipts are made."""
    if settings.receipts == "off" or settings.receipt_keys_file is None:
        return None
    return KeyFile(settings.receipt_keys_file)


def _renewal(linger_s: float) -> list[tuple[str, int]]:
    """Returns gRPC server options that limit the age of connections to half of `linger_s`.

    Without a limit, gRPC clients keep a connection for ever. When the server stops, it sends each
    client the message GOAWAY, which ends the connection. A call that a client sends before it has
    received GOAWAY fails. If a connection ends because it has reached its maximum age, no call
    fails. The age is only half of `linger_s`, because clients still connect until load balancers
    know that this frontend stops.
    """
    if linger_s == 0:
        return []
    return [("grpc.max_connection_age_ms", max(1, int(linger_s * 1000 / 2)))]
