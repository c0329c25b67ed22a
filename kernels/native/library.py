"""Loads the build of the native library that is best for this processor.

There is one build for each instruction set. A function of the portable build detects which
instruction sets the processor has. No build is linked with an OpenMP runtime. Instead, the runtime
that PyTorch has loaded is made visible to the build, so that the library and PyTorch share threads.

A build whose structures differ from Python's is refused (`kernels.native.layout`), since the
library would read memory at wrong addresses.
"""

import ctypes
import logging
import re
from functools import cache
from pathlib import Path

from kernels.build import PORTABLE, instruction_sets, library_path, sources_digest
from kernels.native.layout import check_layout, layout_of

# The path of an OpenMP runtime: the rest of a line of /proc/self/maps from the first slash on.
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*$", re.MULTILINE)

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Returns the best build that this processor can run, and logs the build's instruction set.
    Returns None if no build can be run or loaded."""
    try:
        names = runnable()
    except OSError as error:
        log.warning("native kernels cannot be loaded, PyTorch's are used: %s", error)
        return None
    if not names:
        log.warning("no native kernels, PyTorch's are used; `python -m kernels.build` makes them")
        return None
    log.info("native kernels for %s", names[0])
    return open_library(names[0])


def runnable() -> list[str]:
    """Returns the instruction sets for which this processor and this installation have a build,
    best first.

    A build from other sources is ignored. Raises OSError if a build cannot be loaded.
    """
    if _openmp_path() is None or not _is_current(PORTABLE):
        return []
    portable = _opened(PORTABLE)
    portable.orcinus_has_instruction_set.restype = ctypes.c_bool
    return [
        name
        for name in instruction_sets()
        if portable.orcinus_has_instruction_set(name.encode()) and _is_current(name)
    ]


def open_library(instruction_set: str) -> ctypes.CDLL:
    """Returns the build for `instruction_set`.

    Raises:
        OSError: the build cannot be loaded.
        TypeError: the build has other structures or numbers than Python.
    """
    opened = _opened(instruction_set)
    check_layout(opened, layout_of())
    return opened


def _opened(instruction_set: str) -> ctypes.CDLL:
    ctypes.CDLL(_openmp_path(), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library_path(instruction_set)))


def _is_current(instruction_set: str) -> bool:
    """Returns whether there is a build for `instruction_set` that was made from the present
    sources."""
    if not library_path(instruction_set).exists():
        return False
    built = _opened(instruction_set)
    if not hasattr(built, "orcinus_sources"):
        return False
    built.orcinus_sources.restype = ctypes.c_char_p
    if built.orcinus_sources().decode() == sources_digest():
        return True
    log.warning("the native kernels for %s are built from other sources", instruction_set)
    return False


def _openmp_path() -> str | None:
    """Returns the path of the OpenMP runtime that PyTorch has loaded. Returns None if there is
    none."""
    maps = Path("/proc/self/maps")
    found = _OPENMP.search(maps.read_text()) if maps.exists() else None
    return None if found is None else found.group()
