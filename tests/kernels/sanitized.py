"""A plugin of pytest that has the tests use the sanitised builds of the native library.

`make test-sanitizers` loads it, into a Python that begins with AddressSanitizer's runtime. Nothing
else does: a process without the runtime cannot load these builds.
"""

import pytest

from kernels import build
from kernels.native.library import runnable

build.LIBRARIES = build.SANITIZED


def pytest_report_header() -> str:
    """Says which builds are tested; raises UsageError if there is none, for nothing would be."""
    names = runnable()
    if not names:
        raise pytest.UsageError("there are no sanitised builds of these sources for this machine")
    return f"native kernels, sanitised: {', '.join(names)}"
