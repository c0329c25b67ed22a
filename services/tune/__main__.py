"""`python -m services.tune --model DIR`: finds the settings with which a model serves best here.

The exit status is 0 if the settings were written, 1 if the model does not run, and 130 if a signal
stopped the process. No child process survives.
"""

import asyncio
import sys

import uvloop

from services.common import process
from services.common.by_model import for_all
from services.common.ending import give_up
from services.common.telemetry import configure_logging
from services.local.settings import LocalSettings
from services.local.settings_check import trouble_with
from services.tune.choice import Tuned
from services.tune.model_shape import ModelShape
from services.tune.reasons import reasons
from services.tune.report import command, make_directory, table, write
from services.tune.settings import TuneSettings
from services.tune.system import SystemFailed, TuneLauncher
from services.tune.tuner import Tuner
from services.tune.workload import Workload

INTERRUPTED = 130


async def tune(
    settings: TuneSettings,
    shape: ModelShape,
    workload: Workload,
    launcher_class: type[TuneLauncher],
) -> Tuned | None:
    """Runs the tuner and returns its result. Returns None if a signal stops the process before
    there is a result."""
    stopping = asyncio.create_task(process.stop_event().wait())
    running = asyncio.create_task(
        Tuner(settings, shape, workload, say=progress, launcher_class=launcher_class).run()
    )
    try:
        await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def progress(line: str) -> None:
    """Writes a line about progress to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def announce(settings: TuneSettings, workload: Workload, tuned: Tuned) -> None:
    """Prints the best settings and the reasons for them, and writes the files with the settings."""
    lines = [
        *table(tuned, workload.unit),
        "",
        *reasons(tuned),
        "",
        f"Found in {tuned.seconds:.0f} s. To serve with it: {command(settings, tuned)}",
        *(f"wrote {path}" for path in write(settings, tuned)),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def main(launcher_class: type[TuneLauncher] = TuneLauncher) -> int:
    """Finds, prints and writes the settings. Returns the exit status. Tests pass a launcher class
    that starts other ranks."""
    settings = TuneSettings.load("tune", sys.argv[1:])
    configure_logging("tune", "ERROR")
    if trouble := trouble_with(LocalSettings(model=for_all(settings.model))):
        return give_up(trouble, ready_fd=None)
    try:
        shape = ModelShape.read(settings.model)
        workload = Workload.of(settings, shape.max_model_len)
        make_directory(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            tuned = runner.run(tune(settings, shape, workload, launcher_class))
        if tuned is None:
            return INTERRUPTED
        announce(settings, workload, tuned)
    except (SystemFailed, OSError, ValueError) as error:
        return give_up(error, ready_fd=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
