"""The files of a release, made from the files of one commit."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release import provenance
from services.common.version import VERSION

ROOT = Path(__file__).parents[1]
CHECKSUMS = "SHA256SUMS"
MACHINES = ("x86_64", "aarch64")
"""Architectures that a release has a wheel for."""
LOCKS = ("frontend", "scheduler", "worker-cuda")
"""Names of the lock files in `requirements` that together have all packages that the wheel
needs."""
MATERIALS = (
    "release/requirements.txt",
    "release/backend.py",
    *(f"requirements/{name}.txt" for name in LOCKS),
)
"""Files that pin the programs and packages of a release."""
DISTRIBUTED = ("*.whl", "*.tgz", "*.cdx.json", "*.provenance.json", CHECKSUMS)


class Unreleasable(Exception):
    """The state of the checkout does not allow a release: its files or its tag are wrong."""


def make(directory: Path, tools: Path) -> list[Path]:
    """Makes the files of a release of the present commit in `directory`, and returns their paths.
    Removes the files of earlier releases from `directory`. `tools` is the folder of the programs
    that are used.

    Raises:
        Unreleasable: files differ from the commit, or a tag of the commit names another version.
        FileNotFoundError: a program is missing.
        subprocess.CalledProcessError: a program fails.
    """
    check_tags(_git("tag", "--points-at", "HEAD", "v*").split())
    if changed := _git("status", "--porcelain", "--untracked-files=no"):
        raise Unreleasable(f"files differ from the commit:\n{changed}")
    date_s = int(_git("log", "-1", "--format=%ct"))
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in DISTRIBUTED:
        for path in directory.glob(pattern):
            path.unlink()
    with _exported() as tree:
        for machine in MACHINES:
            build_wheel(tree, directory, tools, date_s, machine)
        pack_chart(tree, directory / f"orcinus-{VERSION}.tgz", date_s)
    list_packages(directory / f"orcinus-{VERSION}.cdx.json", tools)
    state_provenance(directory)
    write_checksums(directory)
    return files_in(directory)


def check_tags(tags: list[str]) -> None:
    """Raises Unreleasable if the commit has tags, and none of them is the tag of `VERSION`."""
    if tags and f"v{VERSION}" not in tags:
        text = f"the commit has the tag {', '.join(tags)}, and services/common/version.py has"
        raise Unreleasable(f"{text} {VERSION}")


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


@contextmanager
def _exported() -> Iterator[Path]:
    """Yields a folder with all files of the commit and no others. The times of the files are the
    time of the commit."""
    archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as made:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(made, filter="data")
        yield Path(made)


def build_wheel(tree: Path, directory: Path, tools: Path, date_s: int, machine: str) -> None:
    """Builds the wheel for `machine` of the sources in `tree` into `directory`. `date_s` is the
    time of its files, in seconds since 1970."""
    python = str(tools.absolute() / "python")
    command = [python, "-m", "build", "--no-isolation", "--wheel"]
    command += ["--config-setting", f"machine={machine}"]
    variables = {**os.environ, "SOURCE_DATE_EPOCH": str(date_s), "PYTHONHASHSEED": "0"}
    places = ["--outdir", str(directory.absolute()), str(tree)]
    subprocess.run([*command, *places], env=variables, check=True)


def pack_chart(tree: Path, file: Path, date_s: int) -> None:
    """Writes the Helm chart of the sources in `tree` as an archive that Helm can install. `date_s`
    is the time of the files in the archive, in seconds since 1970."""
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-m", "k8s.chart", str(Path(made, "orcinus"))]
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(Path(made).rglob("*")):
                if path.is_file():
                    _add(archive, path, str(path.relative_to(made)), date_s)
    file.write_bytes(gzip.compress(packed.getvalue(), mtime=date_s))


def _add(archive: tarfile.TarFile, path: Path, name: str, date_s: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = path.stat().st_size, date_s, 0o644
    with path.open("rb") as content:
        archive.addfile(entry, content)


def list_packages(file: Path, tools: Path) -> None:
    """Writes a list of the packages that the wheel needs, in the versions that were tested. The
    format of the list is CycloneDX."""
    with tempfile.TemporaryDirectory() as made:
        locked = Path(made, "requirements.txt")
        locked.write_text(merged_locks(), encoding="utf-8")
        # Its own validation takes five minutes.
        command = [str(tools / "cyclonedx-py"), "requirements", "--output-reproducible"]
        command += ["--no-validate"]
        about = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
        # It warns that lock files do not say which package is there for which other one.
        variables = {**os.environ, "PYTHONWARNINGS": "ignore"}
        places = ["--output-file", str(file), str(locked)]
        subprocess.run([*command, *about, *places], env=variables, check=True)
    listed = json.loads(file.read_text(encoding="utf-8"))
    listed["metadata"]["component"]["version"] = VERSION  # which pyproject.toml does not say
    file.write_text(f"{json.dumps(listed, indent=2)}\n", encoding="utf-8")


def merged_locks() -> str:
    """Returns the lines of all lock files together, each package with its version, once and without
    hashes. The hashes depend on the index from which PyTorch is installed."""
    lines: set[str] = set()
    for name in LOCKS:
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        lines |= {line.rstrip(" \\") for line in text.splitlines() if line[:1].isalnum()}
    return "".join(f"{line}\n" for line in sorted(lines))


def state_provenance(directory: Path) -> None:
    """Writes the statement of where the files of the release come from."""
    made = provenance.statement(
        files_in(directory),
        commit=_git("rev-parse", "HEAD"),
        root=ROOT,
        materials=MATERIALS,
        machines=MACHINES,
    )
    provenance.write(directory / f"orcinus-{VERSION}.provenance.json", made)


def write_checksums(directory: Path) -> None:
    """Writes the SHA-256 digests of all files of the release, in the form that `sha256sum --check`
    reads."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in files_in(directory)
        if path.name != CHECKSUMS
    ]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def files_in(directory: Path) -> list[Path]:
    """Returns the files of a release in `directory`."""
    return sorted(path for pattern in DISTRIBUTED for path in directory.glob(pattern))
