"""One frontend from start to end: both protocols in one event loop, one stream to the scheduler.

    bind → connect → announce → serve → drain

On the first signal it takes no more requests and lets those that run finish; those that are still
there when the time is up, or when a second signal comes, end as unavailable.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from services.common import rpc
from services.common.process import ReadyPipe, stop_event
from services.frontend.chat_template import ChatTemplate
from services.frontend.generation_service import GenerationService
from services.frontend.grpc_api import Health, InferenceServicer, add_services
from services.frontend.http_server import HttpServer, address_of, listen
from services.frontend.openai_api import create_app
from services.frontend.scheduler_client import SchedulerClient
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FINISH_S = 1.0
"""Seconds for handing out the last errors, after draining."""


async def serve(settings: FrontendSettings) -> int:
    """Serves until a signal; returns the exit status."""
    stop = stop_event()
    try:
        frontend = Frontend(settings)
    except (OSError, ValueError) as error:  # no tokenizer, a broken one, or no address
        log.error("%s", error)
        return 1
    await frontend.run(stop)
    return 0


class Frontend:
    """The parts of a frontend, put together; its addresses are bound."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._scheduler = SchedulerClient(settings.scheduler)
        self._service = GenerationService(
            Tokenizer.from_directory(settings.model),
            self._scheduler,
            chat_template=ChatTemplate.from_directory(settings.model),
            max_in_flight=settings.max_in_flight,
        )
        self._health = Health()
        self._listener = listen(settings.http_address)
        self.http_address = address_of(self._listener, settings.http_address)
        app = create_app(self._service, max_body_bytes=settings.max_body_bytes)
        self._http = HttpServer(app, self._listener)
        self._grpc = rpc.create_server()
        servicer = InferenceServicer(self._service, max_body_bytes=settings.max_body_bytes)
        add_services(self._grpc, servicer, self._health)
        self.grpc_address = rpc.bind(self._grpc, settings.grpc_address)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until the event is set, then drains; a second time ends it at once."""
        await self._health.set_serving(False)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._scheduler.run()),
                tasks.create_task(self._health.follow(self._scheduler)),
                tasks.create_task(self._announce()),
            ]
            http = tasks.create_task(self._http.run_until_stopped())
            await self._grpc.start()
            await stop.wait()
            stop.clear()
            await self._drain(stop)
            self._http.stop()
            await self._grpc.stop(FINISH_S)
            await http
            for task in background:
                task.cancel()

    async def wait_ready(self) -> None:
        """Waits until requests can be answered."""
        await self._scheduler.wait_ready()

    async def _announce(self) -> None:
        """Tells the launcher the addresses once they are of use."""
        await self.wait_ready()
        log.info("serving http on %s, grpc on %s", self.http_address, self.grpc_address)
        addresses = {"http": self.http_address, "grpc": self.grpc_address}
        ReadyPipe(self._settings.ready_fd).report(addresses)

    async def _drain(self, stop: asyncio.Event) -> None:
        log.info("stopping; running requests have %g s", self._settings.drain_s)
        self._service.refuse_new()
        await self._health.stop()
        await _first_of(
            self._service.wait_idle(), stop.wait(), asyncio.sleep(self._settings.drain_s)
        )
        self._scheduler.close()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits for one of several things; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
