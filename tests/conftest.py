"""Set-up of all tests."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

# Speed is measured in `benchmarks/`; a busy machine must not fail a test of behaviour.
settings.register_profile("orcinus", deadline=None)
settings.load_profile("orcinus")

# Where there is no GPU, Triton's kernels are interpreted. It looks when it is imported, which
# `transformers` may do before any test of a kernel.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Tests start hundreds of processes. Where these may not keep bytecode beside the sources, they
    share it in a directory of this run, so that not each of them compiles our modules."""
    if sys.dont_write_bytecode:
        bytecode = TemporaryDirectory(prefix="orcinus-bytecode-", ignore_cleanup_errors=True)
        config.add_cleanup(bytecode.cleanup)
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode.name
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
