"""A release is the same each time it is made, and its wheel serves where there is no compiler."""

import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from kernels.build import HERE, PORTABLE, PROCESSOR, compiler, instruction_sets
from release.release import CHECKSUMS, MACHINES
from services.common.version import VERSION
from tests.install.empty_environment import EmptyEnvironment, ask

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv" / "release" / "bin"
pytestmark = [pytest.mark.install, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is checked out, with the changes that are not committed."""
    clone = tmp_path_factory.mktemp("checkout") / "clone"
    _run("git", "clone", "--quiet", "--shared", str(ROOT), str(clone))
    changes = subprocess.check_output(["git", "diff", "--binary", "HEAD"], cwd=ROOT)
    if changes:
        subprocess.run(["git", "apply", "--index"], input=changes, cwd=clone, check=True)
        author = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
        _run("git", *author, "commit", "--quiet", "--message", "changes", at=clone)
    return clone


@pytest.fixture(scope="module")
def release(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release."""
    return make_release(checkout, tmp_path_factory.mktemp("release"))


def make_release(checkout: Path, directory: Path) -> Path:
    """Makes a release of what is checked out into a directory, and returns that."""
    _run(sys.executable, "-m", "release", "--tools", str(TOOLS), str(directory), at=checkout)
    return directory


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    """The wheel of a release for this machine."""
    return wheel_for(HERE, release)


def wheel_for(machine: str, release: Path) -> Path:
    """Returns the wheel of a release for a machine."""
    [found] = release.glob(f"*_{machine}.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> EmptyEnvironment:
    """A virtual environment with the wheel alone."""
    made = EmptyEnvironment(tmp_path_factory.mktemp("environment"))
    made.install(wheel)
    return made


def _run(*command: str, at: Path = ROOT) -> None:
    variables = {**os.environ, "PYTHONPATH": f"{at}{os.pathsep}{ROOT / 'protos' / 'gen'}"}
    subprocess.run(command, cwd=at, env=variables, check=True)


def test_the_same_commit_makes_the_same_bytes(
    checkout: Path, release: Path, tmp_path: Path
) -> None:
    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in one.iterdir()}
        for one in (release, make_release(checkout, tmp_path))
    )
    assert first == second
    assert len(first) == 6


def test_the_checksums_are_those_of_the_files(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=release, check=True)


def test_the_statement_names_the_commit_and_the_digests(checkout: Path, release: Path) -> None:
    stated = json.loads((release / f"orcinus-{VERSION}.provenance.json").read_text("utf-8"))
    subjects = {it["name"]: it["digest"]["sha256"] for it in stated["subject"]}
    patterns = ("*.whl", "*.tgz", "*.cdx.json")
    assert subjects == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in patterns
        for path in release.glob(pattern)
    }
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()
    source, *_ = stated["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": commit}


def test_the_list_names_the_packages_that_are_tested(release: Path) -> None:
    listed = json.loads((release / f"orcinus-{VERSION}.cdx.json").read_text("utf-8"))
    assert listed["metadata"]["component"]["version"] == VERSION
    versions = {it["name"]: it["version"] for it in listed["components"]}
    assert versions["torch"] == "2.13.0"
    assert {"grpcio", "kubernetes", "llguidance"} <= versions.keys()


def test_the_chart_has_the_version(release: Path) -> None:
    with tarfile.open(release / f"orcinus-{VERSION}.tgz") as archive:
        metadata = archive.extractfile("orcinus/Chart.yaml")
        assert metadata is not None
        assert yaml.safe_load(metadata)["version"] == VERSION


def test_a_checkout_with_changes_is_no_release(checkout: Path, tmp_path: Path) -> None:
    readme = checkout / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(f"{text}\n", encoding="utf-8")
    try:
        with pytest.raises(subprocess.CalledProcessError):
            _run(sys.executable, "-m", "release", str(tmp_path), at=checkout)
    finally:
        readme.write_text(text, encoding="utf-8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("machine", MACHINES)
def test_the_wheel_has_what_serving_needs(release: Path, machine: str) -> None:
    wheel = wheel_for(machine, release)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = archive.read(f"orcinus-{VERSION}.dist-info/RECORD").decode()
        metadata = archive.read(f"orcinus-{VERSION}.dist-info/METADATA").decode()
    assert names == {row[0] for row in csv.reader(io.StringIO(record))}
    libraries = {name for name in names if name.startswith("kernels/native/lib/")}
    sets = [*instruction_sets(machine), PROCESSOR]
    assert libraries == {f"kernels/native/lib/orcinus_{name}.so" for name in sets}
    assert {"orcinus/v1/worker_pb2.py", "services/frontend/page/index.html"} <= names
    assert not [name for name in names if name.startswith(("models/", "tests/", "benchmarks/"))]
    assert "Requires-Dist: torch==" in metadata


@pytest.mark.parametrize("machine", MACHINES)
def test_auditwheel_agrees_with_the_tag(release: Path, machine: str) -> None:
    wheel = wheel_for(machine, release)
    told = subprocess.check_output([TOOLS / "auditwheel", "show", wheel], text=True)
    tag = wheel.stem.rpartition("-")[2]
    assert f'consistent with the following platform tag: "{tag}"' in " ".join(told.split())


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-user")
def test_the_library_for_arm_computes_what_the_one_for_x86_64_does(
    release: Path, tmp_path: Path
) -> None:
    printed = {
        machine: operations(wheel_for(machine, release), machine, tmp_path / machine)
        for machine in MACHINES
    }
    ours, theirs = printed.values()
    assert len(ours) == 25
    assert ours.keys() == theirs.keys()
    for name, numbers in ours.items():
        # Only one of the two machines fuses a multiplication and an addition into one rounding.
        apart = TOLERANCES[name.split()[-1]]
        assert theirs[name] == pytest.approx(numbers, rel=apart, abs=apart), name


TOLERANCES = {"whole": 0.0, "float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative or absolute difference of two results, by their type."""


def operations(wheel: Path, machine: str, directory: Path) -> dict[str, list[float]]:
    """Returns what operations of the portable library in a wheel compute, by the operation and the
    type, from numbers that are made up. Another machine is emulated."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(f"kernels/native/lib/orcinus_{PORTABLE}.so", directory)
    program = str(directory / "operations")
    source = str(Path(__file__).with_name("operations.cpp"))
    command = [*compiler(machine), "-std=c++20", "-O1", "-fopenmp", "-rdynamic", source]
    subprocess.run([*command, "-o", program, "-ldl"], check=True)
    emulator = [f"qemu-{machine}", "-L", f"/usr/{machine}-linux-gnu"] if machine != HERE else []
    printed = subprocess.check_output([*emulator, program, library], text=True)
    found = {}
    for number, line in enumerate(printed.splitlines()):
        name, kind, *values = line.split()
        found[f"{number} {name} {kind}"] = [float(value) for value in values]
    return found


def test_it_serves_without_a_compiler(environment: EmptyEnvironment) -> None:
    with environment.serving(ROOT / "models" / "demo") as url:
        assert ask(url)


def test_native_kernels_are_used(environment: EmptyEnvironment) -> None:
    code = "import torch; from kernels.native.library import library, runnable; "
    code += "assert library() is not None; print(*runnable())"
    assert environment.run(environment.bin / "python", "-c", code).split()[-1] == "portable"
