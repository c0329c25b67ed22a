"""What holds for all tests."""

import os
from pathlib import Path

from hypothesis import settings

# Speed is measured in `benchmarks/`; a busy machine must not fail a test of behaviour.
settings.register_profile("orcinus", deadline=None)
settings.load_profile("orcinus")

# Where there is no GPU, Triton's kernels are interpreted. It looks when it is imported, which
# `transformers` may do before any test of a kernel.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
