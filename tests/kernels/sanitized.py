"""A plugin of pytest that has the tests use the sanitised builds of the native library.

`make test-sanitizers` loads it, into a Python that begins with the sanitisers' runtime. Nothing
else does: a process without the runtime cannot load these builds.
"""

import pytest

from kernels import build
from kernels.native.library import runnable

build.LIBRARIES = build.SANITIZED


def pytest_configure() -> None:
    """Raises UsageError if there is no sanitised build, for nothing would be tested."""
    if not runnable():
        raise pytest.UsageError("there are no sanitised builds of these sources")


def pytest_report_header() -> str:
    """Returns a line for the report that names the tested builds: the builds that this processor
    can run."""
    return f"native kernels, sanitised: {', '.join(runnable())}"
