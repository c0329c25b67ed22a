"""Builds the package. This is setuptools' build backend, which also builds the parts that are not
Python before it builds a wheel.

A wheel contains the native library for each instruction set that its processors may have, and the
Python code of the protobuf messages. Both are made in the source tree. The library is compiled by
g++ 12 or newer, or by the compiler that CXX names. So an installation of the wheel needs no
compiler. `--config-setting machine=aarch64` builds the wheel for another machine by a
cross-compiler, see `kernels/build.py`. A checkout that is installed with `pip install --editable`
uses the same folders, which `make` fills.

A wheel for Linux is tagged with the oldest glibc that has all functions which the libraries use. On
other systems wheels have no native library, and PyTorch's operations are used instead.
"""

import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta

build_sdist = build_meta.build_sdist
build_editable = build_meta.build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

PROTOS = Path("protos")
GENERATED = PROTOS / "gen"
LIBRARIES = Path("kernels/native/lib")
OLDEST = (2, 17)
"""The oldest version of glibc that a tag may name: the version of manylinux2014."""

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns the packages that building a wheel needs, including the protobuf compiler in the
    version that is tested."""
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    tools = [line for line in lines if line.startswith("grpcio-tools==")]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *tools]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds the wheel into `wheel_directory`, and returns the name of the wheel's file. The
    setting `machine` is the architecture that the wheel is for, by default that of this machine."""
    generate_protos()
    given = dict(config_settings or {})
    machine = given.pop("machine", platform.machine())
    tag = build_libraries(machine) if sys.platform == "linux" else "any"
    # Setuptools copies all files there before: what an earlier wheel had must not be in this one.
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            **given,
            "--global-option": ["build", f"--build-base={scratch}"],
            "--build-option": [f"--plat-name={tag}"],
        }
        name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def generate_protos() -> None:
    """Generates the Python code of the protobuf messages and services, as `make protos` does."""
    GENERATED.mkdir(exist_ok=True)
    options = [f"--{kind}_out={GENERATED}" for kind in ("python", "pyi", "grpc_python")]
    contracts = [str(path) for path in sorted(PROTOS.glob("orcinus/v1/*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *options, *contracts]
    subprocess.run(command, check=True)


def build_libraries(machine: str) -> str:
    """Compiles the native library for every instruction set of a machine. Returns the platform tag
    of wheels, which names the oldest glibc that can load all these libraries."""
    command = [sys.executable, "kernels/build.py", "all", "--machine", machine]
    subprocess.run(command, check=True)
    libraries = [path.read_bytes() for path in LIBRARIES.glob("*.so")]
    major, minor = max(OLDEST, *map(needed_glibc, libraries))
    return f"manylinux_{major}_{minor}_{machine}"


def needed_glibc(library: bytes) -> tuple[int, int]:
    """Returns the version, as two numbers, of the newest glibc function that a library uses, or
    OLDEST if the library uses none. `library` is the content of the library's file."""
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])", library)
    return max(((int(major), int(minor)) for major, minor in versions), default=OLDEST)
