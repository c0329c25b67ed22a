"""The systems that the tuner starts are of the settings that it means."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from services.common.by_model import for_all
from services.local.launcher import Launcher, LocalAddresses, OnProgress
from services.local.settings import LocalSettings
from services.scheduler.settings import SchedulerSettings
from services.tune.model_shape import ModelShape
from services.tune.settings import TuneSettings
from services.tune.system import SystemFailed, TuneLauncher, running
from services.tune.tuner import Tuner
from tests.tune.cases import candidate, workload

DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_the_scheduler_takes_the_options_of_a_candidate() -> None:
    async def options() -> dict[str, object]:
        tuner = Tuner(
            TuneSettings(model=DEMO), ModelShape.read(DEMO), workload(), say=lambda _: None
        )
        local = tuner.local_settings(candidate(16, 256), kv_memory=2**26)
        return Launcher(local).scheduler_options(["stage:1"])

    given = {name: value for name, value in asyncio.run(options()).items() if value is not None}
    texts = [f"--{name}={value}" for name, value in given.items() if not isinstance(value, bool)]
    settings = SchedulerSettings.load("scheduler", texts)
    assert (settings.max_batch_size, settings.max_batch_tokens) == (16, 256)
    assert settings.speculative_tokens == 0


class NoPipes(TuneLauncher):
    """A launcher that cannot start a process."""

    async def start(self, on_progress: OnProgress) -> LocalAddresses:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("worker", "n_layouts"), [((), 1), ((("device", "cuda"),), 4)], ids=["cpu", "cuda"]
)
async def test_where_a_single_rank_fails_several_are_tried_if_each_has_a_device(
    worker: tuple[tuple[str, str], ...], n_layouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tune.tuner.usable_cpus", lambda: 2)
    said: list[str] = []
    settings = TuneSettings(model=DEMO, worker=worker)
    tuner = Tuner(
        settings, ModelShape.read(DEMO), workload(), say=said.append, launcher_class=NoPipes
    )
    with pytest.raises(SystemFailed, match=r"a service cannot be started"):
        await tuner.run()
    assert len([line for line in said if line.endswith(": calibrating")]) == n_layouts


async def test_a_system_whose_services_cannot_be_started_has_failed() -> None:
    with pytest.raises(SystemFailed, match=r"cannot be started: .*Too many open files"):
        async with running(LocalSettings(model=for_all(DEMO)), NoPipes):
            pass
