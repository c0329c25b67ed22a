"""Loads the build of the native library that is best for this processor.

There is one build for each instruction set. A small library that runs on every processor detects
the features of this processor (`kernels.build.processor_features`). A build that needs more
features is not loaded. `make run` compiles only the best build for its machine; a container image
has all builds.

No build is linked with an OpenMP runtime. Instead, the runtime that PyTorch has loaded is made
visible to the build, so that the library and PyTorch share threads.

A build whose structures differ from Python's is refused (`kernels.native.layout`), because it would
read memory at wrong addresses.
"""

import ctypes
import logging
import re
from functools import cache
from pathlib import Path

from kernels.build import (
    PROCESSOR,
    is_current,
    library_path,
    processor_features,
    runnable_with,
)
from kernels.native.layout import check_layout, layout_of

# The path of an OpenMP runtime: the rest of a line of /proc/self/maps from the first slash on.
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*$", re.MULTILINE)

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Loads and returns the best build that this processor can run, and logs the build's
    instruction set. Returns None if no build can be run or loaded. Further calls return the same
    result.

    Raises:
        TypeError: the build has other structures or numbers than Python.
    """
    try:
        names = runnable()
        opened = open_library(names[0]) if names else None
    except OSError as error:
        log.warning("native kernels cannot be loaded, PyTorch's are used: %s", error)
        return None
    if opened is None:
        log.warning("no native kernels, PyTorch's are used; `python -m kernels.build` makes them")
        return None
    log.info("native kernels for %s", names[0])
    best = runnable_with(processor_features())[0]
    if best != names[0]:
        log.warning("%s is faster on this processor; `python -m kernels.build` makes it", best)
    return opened


def instruction_set() -> str:
    """Returns the instruction set of the build that `library` returns; an empty text if there is
    none."""
    return "" if library() is None else runnable()[0]


def runnable() -> list[str]:
    """Returns the instruction sets that this processor supports and for which a current build is
    installed, the best one first.

    Raises OSError if the features of the processor cannot be detected.
    """
    if _openmp_path() is None or not _is_usable(PROCESSOR):
        return []
    return [name for name in runnable_with(processor_features()) if _is_usable(name)]


def open_library(instruction_set: str) -> ctypes.CDLL:
    """Loads and returns the build for `instruction_set`.

    Raises:
        OSError: the build cannot be loaded.
        TypeError: the build has other structures or numbers than Python.
    """
    ctypes.CDLL(_openmp_path(), mode=ctypes.RTLD_GLOBAL)
    opened = ctypes.CDLL(str(library_path(instruction_set)))
    check_layout(opened, layout_of())
    return opened


def _is_usable(name: str) -> bool:
    """Returns whether the library `name` exists and is current. Logs a warning if it exists and is
    not current."""
    path = library_path(name)
    if path.exists() and not is_current(path):
        log.warning("the native kernels for %s are built from other sources", name)
        return False
    return path.exists()


def _openmp_path() -> str | None:
    """Returns the path of the OpenMP runtime that PyTorch has loaded. Returns None if there is
    none."""
    maps = Path("/proc/self/maps")
    found = _OPENMP.search(maps.read_text()) if maps.exists() else None
    return None if found is None else found.group()
