"""`python -m services.local --model DIR`: serves a model on this machine.

Shows how far the weights are loaded, and prints one line when the model is served. Exit status 0
after SIGINT or SIGTERM; 1 when a service has died and is not started again.
"""

import asyncio
import contextlib
import sys

from tqdm import tqdm

from services.common import process
from services.common.ending import give_up
from services.common.gguf.header import model_name
from services.common.telemetry import configure_logging
from services.local.child import ChildDied
from services.local.launcher import Launcher, LocalAddresses
from services.local.settings import LocalSettings
from services.local.settings_check import is_open_to_all, trouble_with

EXAMPLE = '{"prompt": "If the file does not exist,", "max_tokens": 40, "temperature": 0.7}'
LAST_WORDS_S = 1.5
"""Seconds in which a pipeline that has lost a member may tell its clients before all services are
stopped."""


class LoadingBar:
    """A progress bar of the bytes that all stages have loaded, on standard error if that is a
    terminal."""

    def __init__(self) -> None:
        self._bar = tqdm(
            desc="loading weights", unit="B", unit_scale=True, total=0, leave=False, disable=None
        )
        self._stages: dict[int, tuple[int, int]] = {}

    def update(self, stage_index: int, n_done: int, n_total: int) -> None:
        """Adds the progress of a stage."""
        self._stages[stage_index] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._stages.values(), strict=True))
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Removes the bar from the screen."""
        self._bar.close()


def announce(settings: LocalSettings, endpoints: LocalAddresses) -> None:
    """Prints the addresses for clients, and a command to try."""
    name = next(iter(settings.served_model_name), model_name(settings.model))
    scheme = "http" if settings.tls_dir is None else "https"
    root = f"{scheme}://{endpoints.http}"
    url = f"{root}/v1"
    key = "" if settings.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    for service, address in endpoints.metrics.items():
        sys.stdout.write(f"Metrics of {service}: http://{address}/metrics\n")
    sys.stdout.write(
        f"Orcinus serves {name} on {settings.stages} stage{'s'[: settings.stages > 1]}: "
        f"OpenAI {url}  gRPC {endpoints.grpc}\n"
        f"Try: curl {url}/completions{key} -H 'Content-Type: application/json' -d '{EXAMPLE}'\n"
    )
    if settings.page:
        sys.stdout.write(f"See it at work: {root}/\n")
    sys.stdout.flush()


async def serve(settings: LocalSettings, launcher_class: type[Launcher]) -> int:
    """Serves until stopped or until a service is not started again; returns the exit status, 0 or
    1."""
    stopping = asyncio.create_task(process.stop_event().wait())
    running = asyncio.create_task(launch(settings, launcher_class))
    try:
        await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else 0
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def launch(settings: LocalSettings, launcher_class: type[Launcher]) -> int:
    """Starts all services and waits for the first that is not started again."""
    bar = LoadingBar()
    has_served = False
    async with launcher_class(settings) as launcher:
        starting = asyncio.create_task(launcher.start(bar.update))
        try:
            await asyncio.wait((starting, launcher.death), return_when=asyncio.FIRST_COMPLETED)
            bar.close()
            if starting.done():
                with contextlib.suppress(ChildDied):  # `death` says which one, and how
                    announce(settings, starting.result())
                    has_served = True
            reason = await launcher.death
            if has_served:
                await asyncio.sleep(LAST_WORDS_S)
        finally:
            bar.close()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    return give_up(reason, ready_fd=None)  # nobody else writes anything any more


def main(
    settings_class: type[LocalSettings] = LocalSettings, launcher_class: type[Launcher] = Launcher
) -> int:
    """Serves a model; benchmarks pass another scheduler."""
    settings = settings_class.load("local", sys.argv[1:])
    configure_logging("local", settings.log_level)
    if trouble := trouble_with(settings):
        return give_up(trouble, ready_fd=None)
    if is_open_to_all(settings):
        sys.stderr.write(
            f"warning: whoever reaches {settings.host} may use the model, since there is no "
            "--api-keys-file\n"
        )
    return process.run(serve(settings, launcher_class))


if __name__ == "__main__":
    sys.exit(main())
