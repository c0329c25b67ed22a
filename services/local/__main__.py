"""`python -m services.local --model DIR`: serves a model on this machine, or several.

The command shows the progress of loading the weights, and prints the addresses when all models are
served. The exit status is 0 after SIGINT or SIGTERM. It is 1 when a setting is wrong, or when a
service that is needed cannot be started, or has died and is not started again.
"""

import asyncio
import sys
from collections.abc import Mapping

from tqdm import tqdm

from services.common import process
from services.common.ending import give_up
from services.common.model_task import ModelTask
from services.common.telemetry import configure_logging
from services.local.child import ChildDied
from services.local.launcher import Launcher, LocalAddresses
from services.local.settings import LocalSettings
from services.local.settings_check import is_open_to_all, trouble_with

COMPLETION = (
    "completions",
    '{"prompt": "If the file does not exist,", "max_tokens": 40, "temperature": 0.7}',
)
"""Route and body of the example request for a model that only continues texts."""
CHAT = (
    "chat/completions",
    '{"messages": [{"role": "user", "content": "How do I copy a file?"}], "max_tokens": 40}',
)
"""Route and body of the example request for a model that answers conversations."""
VECTORS = ("embeddings", '{"input": ["What is a lien?", "How tall is a giraffe?"]}')
"""Route and body of the example request for a model that only makes embeddings."""
SCORES = ("rerank", '{"query": "What is a lien?", "documents": ["A giraffe is tall."]}')
"""Route and body of the example request for a model that only scores documents for a query."""
EXAMPLES: Mapping[ModelTask, tuple[str, str]] = {
    "text": COMPLETION,
    "chat": CHAT,
    "vectors": VECTORS,
    "scores": SCORES,
}
LAST_WORDS_S = 1.5
"""Seconds between the loss of a service and the stop of all other services.

The pipeline can use this time to send errors to its clients.
"""


class LoadingBar:
    """A progress bar of the bytes of weights that all workers have loaded.

    The bar is shown only if standard error is a terminal.
    """

    def __init__(self) -> None:
        self._bar = tqdm(
            desc="loading weights", unit="B", unit_scale=True, total=0, leave=False, disable=None
        )
        self._workers: dict[int, tuple[int, int]] = {}

    def update(self, worker: int, n_done: int, n_total: int) -> None:
        """Redraws the bar after a worker has loaded more. `worker` is the index of the worker. Of
        the `n_total` bytes of its weights, it has loaded `n_done`."""
        self._workers[worker] = (n_done, n_total)
        done, total = (sum(column) for column in zip(*self._workers.values(), strict=True))
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Removes the bar from the screen."""
        self._bar.close()


def announce(settings: LocalSettings, endpoints: LocalAddresses) -> None:
    """Prints the addresses of the APIs and of the services' metrics, an example request that suits
    the first model, and the report on each model's checkpoint."""
    names = settings.model_names
    scheme = "http" if settings.tls_dir is None else "https"
    root = f"{scheme}://{endpoints.http}"
    url = f"{root}/v1"
    key = "" if settings.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    route, body = EXAMPLES[endpoints.task]
    if len(names) > 1:
        body = f'{{"model": "{names[0]}", {body.removeprefix("{")}'
    for service, address in endpoints.metrics.items():
        sys.stdout.write(f"Metrics of {service}: http://{address}/metrics\n")
    sys.stdout.write(
        f"Orcinus serves {' and '.join(names)} on {shape_of(settings)}: "
        f"OpenAI {url}  gRPC {endpoints.grpc}\n"
        f"Try: curl {url}/{route}{key} -H 'Content-Type: application/json' -d '{body}'\n"
    )
    if settings.page:
        sys.stdout.write(f"See it at work: {root}/\n")
    for name, report in endpoints.reports.items():
        if len(names) > 1:
            sys.stdout.write(f"{name}\n")
        for about, text in report:
            sys.stdout.write(f"  {about:<14} {text}\n")
    sys.stdout.flush()


def shape_of(settings: LocalSettings) -> str:
    """Returns the numbers of pipelines and stages as text: `2 stages`, `3 pipelines of 1 stage`."""
    stages = f"{settings.stages} stage{'s'[: settings.stages > 1]}"
    each = " each" if len(settings.model) > 1 else ""
    if settings.pipelines == 1:
        return stages + each
    return f"{settings.pipelines} pipelines of {stages}{each}"


async def serve(settings: LocalSettings, launcher_class: type[Launcher]) -> int:
    """Serves all models until SIGTERM or SIGINT, or until a service that is needed has ended and is
    not restarted.

    Returns the exit status: 0 after a signal, otherwise 1.
    """
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
    """Starts all services, and waits until one that is needed has ended and is not restarted, or
    cannot be started.

    Returns the exit status, which is 1.
    """
    bar = LoadingBar()
    async with launcher_class(settings) as launcher:
        starting = asyncio.create_task(launcher.start(bar.update))
        try:
            await asyncio.wait((starting, launcher.death), return_when=asyncio.FIRST_COMPLETED)
            bar.close()
            reason = await _reason_of_end(settings, launcher, starting)
        finally:
            bar.close()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    return give_up(reason, ready_fd=None)  # no service writes to the terminal any more


async def _reason_of_end(
    settings: LocalSettings, launcher: Launcher, starting: asyncio.Task[LocalAddresses]
) -> str:
    """Announces the services if `starting` is done, and returns the reason why they end: one could
    not be started, or one that is needed has ended and is not restarted."""
    if not starting.done():
        return await launcher.death
    try:
        addresses = starting.result()
    except ChildDied:
        return await launcher.death
    except OSError as error:
        return f"a service cannot be started: {error}"
    announce(settings, addresses)
    reason = await launcher.death
    await asyncio.sleep(LAST_WORDS_S)
    return reason


def main(
    settings_class: type[LocalSettings] = LocalSettings, launcher_class: type[Launcher] = Launcher
) -> int:
    """Serves all models, and returns the exit status.

    Benchmarks pass other classes, which run another scheduler.
    """
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
