"""Set-up of all tests."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.case_sample import drawn_cases, group_of
from tests.environments import AUTHORITY, PROXIES

# Speed is measured in `benchmarks/`; a busy machine must not fail a test of behaviour. A property
# has few examples, and `EXAMPLES` in the thorough tests, by default as many as Hypothesis makes.
N_EXAMPLES = int(os.environ.get("EXAMPLES", "100"))
settings.register_profile("orcinus", deadline=None, max_examples=10)
settings.register_profile("thorough", deadline=None, max_examples=N_EXAMPLES)
settings.load_profile("orcinus")

# How many cases of each test run, or of each folder of tests of whole systems, where not all of
# them do, and what these are drawn by.
SAMPLE = int(os.environ.get("SAMPLE") or 0)
SAMPLE_SEED = os.environ.get("SAMPLE_SEED", "")

# Where there is no GPU, Triton's kernels are interpreted. It looks when it is imported, which
# `transformers` may do before any test of a kernel.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads of OpenMP that wait for work spin, which takes the processors from tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Clients of tests reach servers on this machine, also where the way out of it is a proxy.
for name in PROXIES:
    os.environ.pop(name, None)

os.environ["SSL_CERT_FILE"] = str(AUTHORITY)

# A shell has what it starts in the background ignore Ctrl-C, and so would all processes of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _root_logger() -> Generator[None]:
    """Restores the root logger after each test, because a program that a test runs in this process
    configures it. Otherwise later tests would miss log records below the program's level."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)


def pytest_configure(config: pytest.Config) -> None:
    """Makes this process and all processes of tests share bytecode in `.pytest_cache`, if Python
    must not write bytecode beside the sources. All runs share it, even if each has a `cache_dir` of
    its own.

    Tests start hundreds of processes, each of which would compile our modules again. Also, each run
    would rewrite the assertions of all tests again, which takes ten seconds.
    """
    if sys.dont_write_bytecode:
        sys.pycache_prefix = str(config.rootpath / ".pytest_cache/bytecode")
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes modules and tests from garbage collection. They are a million objects that are never
    freed, and would be examined again and again while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If a sample is requested, keeps only a sample of the cases that the options select."""
    if SAMPLE:
        groups = {
            item.nodeid: group_of(item.nodeid, is_of_system=starts_a_system(item)) for item in items
        }
        drawn = drawn_cases(groups, SAMPLE, SAMPLE_SEED)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn])
        items[:] = [item for item in items if item.nodeid in drawn]


def starts_a_system(item: pytest.Item) -> bool:
    """Returns whether a test needs a whole system that it shares with few other tests. The system
    tests of the default suite share one system."""
    marks = {mark.name for mark in item.iter_markers()}
    return "cluster" in marks or {"system", "thorough"} <= marks


def pytest_report_header() -> str | None:
    """Returns the line that says how to repeat a run of a sample, or None if all cases run."""
    return f"a sample: SAMPLE={SAMPLE} SAMPLE_SEED={SAMPLE_SEED} repeats it" if SAMPLE else None
