"""The systems that the tuner starts are of the settings that it means."""

import asyncio
from pathlib import Path

from services.local.launcher import Launcher
from services.scheduler.settings import SchedulerSettings
from services.tune.model_shape import ModelShape
from services.tune.settings import TuneSettings
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
