"""`python -m tests.hostile.tree`: `services.local` whose services get further options, and fewer
descriptors.

`HOSTILE_OPTIONS` is JSON: the options of each service, by its module. `HOSTILE_DESCRIPTORS` is the
number of descriptors that each process may have.
"""

import json
import os
import resource
import sys
from typing import Any

from services.local import __main__ as local
from services.local.child import Child
from services.local.launcher import Launcher
from services.local.settings import LocalSettings

OPTIONS_VARIABLE = "HOSTILE_OPTIONS"
DESCRIPTORS_VARIABLE = "HOSTILE_DESCRIPTORS"


class PodLauncher(Launcher):
    """Starts the services with the same options as in their pods."""

    async def _start(
        self, wave: int, name: str, module: str, options: dict[str, object], **others: Any
    ) -> Child:
        more = json.loads(os.environ[OPTIONS_VARIABLE]).get(module, {})
        return await super()._start(wave, name, module, {**options, **more}, **others)


if __name__ == "__main__":
    if limit := os.environ.get(DESCRIPTORS_VARIABLE):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    sys.exit(local.main(LocalSettings, PodLauncher))
