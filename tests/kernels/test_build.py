"""Which builds of the native library are compiled, with a compiler that only notes its calls."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from kernels.native.library import runnable
from tests.limits import HANG_S

V3, V4 = {"x86-64-v3"}, {"x86-64-v3", "x86-64-v4"}
on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="one build elsewhere")

# Flags of /proc/cpuinfo that stand for a feature.
CPU_FLAGS = {
    "x86-64-v3": "avx2 bmi1 bmi2 f16c fma abm movbe",
    "x86-64-v4": "avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512cd avx512dq avx512vl",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
}

# A processor that has what an environment variable says.
FAKE_PROCESSOR = """
#include <cstdlib>
#include <cstring>
extern "C" const char* orcinus_sources() { return ORCINUS_SOURCES; }
extern "C" int orcinus_has_feature(const char* feature) {
  return std::strstr(std::getenv("FEATURES"), feature) != nullptr;
}
"""

# Compiles the library of the processor. Any other output is the text of the options.
FAKE_COMPILER = """#!/bin/sh
case "$*" in *.processor.o*) exec g++ "$@" ;; esac
for output; do :; done
text="$* $(for input; do case "$input" in *.o) cat "$input" 2>/dev/null ;; esac; done)"
echo "$text" >"$output"
"""


@on_x86_64
@pytest.mark.parametrize(
    ("features", "names"),
    [
        (set(), []),
        ({"avx512bf16", "avx512vnni"}, []),
        (V3, ["avx2"]),
        (V3 | {"avx512vnni"}, ["avx2"]),
        (V4, ["avx512", "avx2"]),
        (V4 | {"avx512bf16"}, ["avx512", "avx2"]),
        (V4 | {"avx512bf16", "avx512vnni"}, ["avx512_bf16", "avx512", "avx2"]),
        (V4 | {"avx512bf16", "avx512vnni", "more"}, ["avx512_bf16", "avx512", "avx2"]),
    ],
    ids=lambda value: " ".join(sorted(value)) or "none",
)
def test_a_processor_runs_the_builds_whose_features_it_has(
    features: set[str], names: list[str]
) -> None:
    assert build.runnable_with(features) == [*names, build.PORTABLE]


@pytest.mark.skipif(not runnable(), reason="the native library is not built")
def test_the_features_of_this_processor_are_the_flags_that_linux_tells() -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    expected = {feature for feature, needed in CPU_FLAGS.items() if set(needed.split()) <= flags}
    assert build.processor_features() == expected


@on_x86_64
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["best"], ["avx2"]),
        (["runnable"], ["avx2", "portable"]),
        (["portable", "best", "avx2"], ["avx2", "portable"]),
        (["avx512"], ["avx512"]),
        (["all"], ["avx512_bf16", "avx512", "avx2", "portable"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_builds_are_named_by_what_the_processor_has(words: list[str], names: list[str]) -> None:
    assert build.named_by(words, V3) == names


def test_an_unknown_build_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no build avx1024; there are best, runnable, all"):
        build.named_by(["best", "avx1024"], ())


class Checkout:
    """A copy of the sources, on a processor and with a compiler that are not real."""

    def __init__(self, root: Path) -> None:
        self._script = root / "kernels" / "build.py"
        self.native = root / "kernels" / "native"
        self.native.mkdir(parents=True)
        shutil.copy(build.__file__, self._script)
        shutil.copytree(build.SOURCES, self.native / "src")
        (self.native / "src" / "processor.cpp").write_text(FAKE_PROCESSOR, encoding="utf-8")
        self.compiler = root / "compiler"
        self.compiler.write_text(FAKE_COMPILER, encoding="utf-8")
        self.compiler.chmod(0o755)

    def build(self, *arguments: str, features: str = "") -> str:
        """Returns what `kernels/build.py` writes."""
        environment = {**os.environ, "CXX": str(self.compiler), "FEATURES": features}
        command = [sys.executable, str(self._script), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        return done.stdout + done.stderr

    def built(self, folder: str = "lib") -> dict[str, str]:
        """Returns the text of each build, by instruction set."""
        paths = (self.native / folder).glob("orcinus_*.so")
        texts = {path.stem.removeprefix("orcinus_"): path for path in paths}
        return {
            name: path.read_text(encoding="utf-8")
            for name, path in texts.items()
            if name != build.PROCESSOR
        }


@pytest.fixture(name="checkout")
def make_checkout(tmp_path: Path) -> Checkout:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    return Checkout(tmp_path)


@on_x86_64
def test_the_best_build_is_compiled_once_and_another_where_the_processor_is_another(
    checkout: Checkout,
) -> None:
    assert "native kernels for avx2\n" in checkout.build(features="x86-64-v3")
    assert list(checkout.built()) == ["avx2"]
    assert "-march=x86-64-v3" in checkout.built()["avx2"]
    assert checkout.build(features="x86-64-v3") == ""
    better = "x86-64-v3 x86-64-v4 avx512bf16 avx512vnni"
    assert "native kernels for avx512_bf16\n" in checkout.build(features=better)
    assert checkout.built().keys() == {"avx2", "avx512_bf16"}
    options = checkout.built()["avx512_bf16"]
    assert "-march=x86-64-v4 -mavx512bf16 -mavx512vnni" in options
    assert checkout.build(features="x86-64-v3") == ""


def test_all_builds_are_compiled_on_a_processor_that_has_nothing(checkout: Checkout) -> None:
    checkout.build("all")
    assert checkout.built().keys() == set(build.instruction_sets())


def test_builds_of_other_sources_are_removed(checkout: Checkout) -> None:
    checkout.build("all")
    with (checkout.native / "src" / "linear.cpp").open("a", encoding="utf-8") as file:
        file.write("// more\n")
    checkout.build("portable")
    assert list(checkout.built()) == ["portable"]


def test_sanitised_builds_have_a_folder_of_their_own(checkout: Checkout) -> None:
    checkout.build("best", "--sanitize")
    assert checkout.built() == {}
    assert "-fsanitize=address" in checkout.built("lib/sanitized")["portable"]


def test_a_compiler_that_fails_leaves_no_library(checkout: Checkout) -> None:
    text = FAKE_COMPILER.replace(
        "for output", 'case "$*" in *linear.cpp*) exit 1 ;; esac\nfor output'
    )
    checkout.compiler.write_text(text, encoding="utf-8")
    assert "were not built" in checkout.build("portable")
    assert checkout.built() == {}
    checkout.compiler.unlink()
    assert "No such file" in checkout.build("portable")


@pytest.mark.parametrize(
    ("machine", "names"),
    [("x86_64", ["avx512_bf16", "avx512", "avx2", "portable"]), ("aarch64", ["portable"])],
)
def test_each_machine_has_instruction_sets_of_its_own(machine: str, names: list[str]) -> None:
    assert build.named_for(machine, ["all"]) == names
    with pytest.raises(ValueError, match="no build best"):
        build.named_for(machine, ["best"])


@pytest.mark.thorough
def test_libraries_for_another_machine_replace_ours_and_ours_replace_them(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "aarch64" if build.HERE == "x86_64" else "x86_64"
    monkeypatch.setenv("CROSS_CXX", f"{checkout.compiler} -DOTHER")
    checkout.build("all")
    checkout.build("all", "--machine", other)
    assert checkout.built().keys() == set(build.instruction_sets(other))
    assert "-DOTHER" in checkout.built()["portable"]
    checkout.build("all")
    assert checkout.built().keys() == set(build.instruction_sets())
    assert "-DOTHER" not in checkout.built()["portable"]
