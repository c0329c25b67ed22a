"""A release is the same each time it is made, and its wheel serves where there is no compiler."""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from release.release import CHECKSUMS
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
    """The wheel of a release."""
    [found] = release.glob("*.whl")
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
    assert len(first) == 5


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


def test_the_wheel_has_what_serving_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = archive.read(f"orcinus-{VERSION}.dist-info/RECORD").decode()
        metadata = archive.read(f"orcinus-{VERSION}.dist-info/METADATA").decode()
    assert names == {row[0] for row in csv.reader(io.StringIO(record))}
    sets = ("avx512_bf16", "avx512", "avx2", "portable", "processor")
    assert {f"kernels/native/lib/orcinus_{name}.so" for name in sets} <= names
    assert {"orcinus/v1/worker_pb2.py", "services/frontend/page/index.html"} <= names
    assert not [name for name in names if name.startswith(("models/", "tests/", "benchmarks/"))]
    assert "Requires-Dist: torch==" in metadata


def test_auditwheel_agrees_with_the_tag(wheel: Path) -> None:
    told = subprocess.check_output([TOOLS / "auditwheel", "show", wheel], text=True)
    tag = wheel.stem.rpartition("-")[2]
    assert f'consistent with the following platform tag: "{tag}"' in " ".join(told.split())


def test_it_serves_without_a_compiler(environment: EmptyEnvironment) -> None:
    with environment.serving(ROOT / "models" / "demo") as url:
        assert ask(url)


def test_native_kernels_are_used(environment: EmptyEnvironment) -> None:
    code = "import torch; from kernels.native.library import library, runnable; "
    code += "assert library() is not None; print(*runnable())"
    assert environment.run(environment.bin / "python", "-c", code).split()[-1] == "portable"
