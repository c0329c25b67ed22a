"""Where `make setup` takes PyTorch from (`requirements/install.sh`), with nothing installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
SCRIPT = "requirements/install.sh"
VERSION = "9.8.7"
USUAL = "install --require-hashes --no-deps -r requirements/torch.txt"
LOCKED = "install --require-hashes --no-deps -r requirements/dev.txt"
LOCKED_TO_SERVE = "install --require-hashes --no-deps -r requirements/local.txt"
OURS = "install --quiet --no-deps --no-build-isolation -e ."
LIBRARIES = f"install torch=={VERSION}"
REST = [LOCKED, LIBRARIES, f"{OURS} -e clients/python"]
DRY = f"install --quiet --dry-run --no-index --no-deps torch=={VERSION}"

PIP = """#!/bin/sh
echo "$*" >>{log}
case "$*" in
  *--dry-run*) exit {folder_status} ;;
  *--index-url*) exit {index_status} ;;
esac
echo 'Collecting numpy'
echo '  Downloading numpy-2.4.6-cp311.whl (16.7 MB)'
echo '  Downloading tiny-1.0-py3.whl (12 kB)'
echo '  Downloading middling-1.0-py3.whl (2.5 MB)'
exit {rest_status}
"""
PYTHON = """#!/bin/sh
case "$*" in *importlib.metadata*) exit {installed_status} ;; *) exec {python} "$@" ;; esac
"""
UV = """#!/bin/sh
echo "uv $*" >>{log}
echo 'Downloading numpy (16.7MiB)' >&2
echo ' + numpy==2.4.6' >&2
exit {rest_status}
"""
NVIDIA_SMI = """#!/bin/sh
{gpus}
"""


GPU = "echo 'GPU 0: a GPU'"
MANY_GPUS = "seq -f 'GPU %g: a GPU' 20000 || exit 1"  # more than a pipe holds


class Machine:
    """A machine whose pip and uv only note how they are called, and say what they are told to."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "requirements").mkdir()
        shutil.copy(ROOT / SCRIPT, root / SCRIPT)
        lock = f"networkx==1 \\\n    --hash=sha256:1\ntorch=={VERSION} \\\n    --hash=sha256:2\n"
        (root / "requirements" / "torch.txt").write_text(lock, encoding="utf-8")
        (root / "bin").mkdir()
        self.log = root / "calls"

    def install(
        self,
        *,
        is_installed: bool = False,
        is_in_a_folder: bool = False,
        gpus: str = "",
        index_status: int = 0,
        rest_status: int = 0,
        extra: str = "dev",
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs the script."""
        programs = {
            "pip": PIP.format(
                log=self.log,
                folder_status=int(not is_in_a_folder),
                index_status=index_status,
                rest_status=rest_status,
            ),
            "uv": UV.format(log=self.log, rest_status=rest_status),
            "python": PYTHON.format(installed_status=int(not is_installed), python=sys.executable),
            "nvidia-smi": NVIDIA_SMI.format(gpus=gpus),
        }
        for name, text in programs.items():
            (self._root / "bin" / name).write_text(text, encoding="utf-8")
            (self._root / "bin" / name).chmod(0o755)
        bin_ = str(self._root / "bin")
        return subprocess.run(
            [str(self._root / SCRIPT), extra],
            env={"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "BIN": bin_, **variables},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def calls(self) -> list[str]:
        """How pip and uv were called."""
        return self.log.read_text(encoding="utf-8").splitlines()


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """An index that answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


NOBODY = "http://127.0.0.1:1"


def fetch(index: str) -> str:
    """The call that takes PyTorch from an index."""
    return (
        f"install --quiet --no-deps --timeout 15 --retries 1 --index-url {index} torch=={VERSION}"
    )


def beside(index: str) -> list[str]:
    """The calls after PyTorch is taken from an index. What its build needs beside the locked
    packages is in that index, too."""
    libraries = LIBRARIES.replace("install", f"install --extra-index-url {index}")
    return [LOCKED, libraries, REST[-1]]


def test_without_a_gpu_the_build_without_cuda_is_taken(machine: Machine, index: str) -> None:
    done = machine.install(CPU_INDEX=index)
    assert machine.calls() == [DRY, fetch(index), *REST]
    assert "the build without CUDA" in done.stdout


@pytest.mark.parametrize("gpus", ["", GPU, MANY_GPUS], ids=["index-is-away", "gpu", "many-gpus"])
def test_otherwise_the_usual_index_is_taken_and_its_size_said(
    machine: Machine, index: str, gpus: str
) -> None:
    done = machine.install(gpus=gpus, CPU_INDEX=index if gpus else NOBODY)
    assert done.returncode == 0
    assert machine.calls() == [DRY, USUAL, *REST]
    assert "2.5 GB more" in done.stdout


def test_an_index_that_fails_is_done_without(machine: Machine, index: str) -> None:
    done = machine.install(CPU_INDEX=index, index_status=1)
    assert done.returncode == 0
    assert machine.calls() == [DRY, fetch(index), USUAL, *REST]


def test_a_torch_that_is_there_stays(machine: Machine, index: str) -> None:
    done = machine.install(is_installed=True, CPU_INDEX=index, TORCH_INDEX=index)
    assert machine.calls() == beside(index)
    assert "2.5 GB" not in done.stdout


def test_a_torch_in_pips_folders_is_taken_from_there(machine: Machine, index: str) -> None:
    machine.install(is_in_a_folder=True, CPU_INDEX=index)
    assert machine.calls() == [DRY, f"install --quiet --no-deps torch=={VERSION}", *REST]


def test_an_index_that_is_given_is_taken_and_must_work(machine: Machine, index: str) -> None:
    assert machine.install(gpus=GPU, TORCH_INDEX=NOBODY).returncode == 0
    assert machine.calls() == [fetch(NOBODY), *beside(NOBODY)]
    assert machine.install(TORCH_INDEX=NOBODY, index_status=1).returncode == 1


def test_an_empty_index_is_that_of_everything_else(machine: Machine, index: str) -> None:
    machine.install(CPU_INDEX=index, TORCH_INDEX="")
    assert machine.calls() == [DRY, USUAL, *REST]


def test_serving_needs_less_than_everything(machine: Machine) -> None:
    assert machine.install(is_installed=True, extra="local").returncode == 0
    assert machine.calls() == [LOCKED_TO_SERVE, LIBRARIES, OURS]
    unknown = machine.install(is_installed=True, extra="loca")
    assert unknown.returncode == 1
    assert "local or dev, not loca" in unknown.stderr


def test_large_packages_are_named_and_failures_pass_on(machine: Machine) -> None:
    done = machine.install(is_installed=True)
    assert "  numpy-2.4.6-cp311  16.7 MB" in done.stdout.splitlines()
    assert "tiny" not in done.stdout
    assert "middling" not in done.stdout
    assert machine.install(is_installed=True, rest_status=1).returncode == 1


def test_uv_installs_everything_but_pytorch(machine: Machine) -> None:
    uv = str(machine.log.parent / "bin" / "uv")
    done = machine.install(TORCH_INDEX=NOBODY, UV=uv)
    by_uv = f"uv pip install --python {machine.log.parent}/bin/python --no-progress"
    locked, libraries, ours = beside(NOBODY)
    assert machine.calls() == [
        fetch(NOBODY),
        locked.replace("install", by_uv, 1),
        libraries,
        ours.replace("install", by_uv, 1),
    ]
    assert "Downloading numpy (16.7MiB)" in done.stdout.splitlines()
    assert "numpy==2.4.6" not in done.stdout
    assert machine.install(is_installed=True, rest_status=1, UV=uv).returncode == 1


def make(
    *arguments: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs make, with the programs of `path` before all others."""
    ours = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "TORCH_INDEX"}
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def programs(directory: Path, **texts: str) -> Path:
    """Writes shell scripts, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (directory / name).chmod(0o755)
    return directory


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        pytest.param([], None, id="not-given"),
        pytest.param(["TORCH_INDEX="], "TORCH_INDEX='' requirements", id="empty"),
        pytest.param(["TORCH_INDEX=http://x"], "TORCH_INDEX='http://x' requirements", id="given"),
    ],
)
@pytest.mark.parametrize(("target", "extra"), [(".serves", "local"), (".installed", "dev")])
def test_make_passes_an_index_on_only_where_it_is_given(
    arguments: list[str], given: str | None, target: str, extra: str
) -> None:
    done = make("--dry-run", "--always-make", f".venv/{target}", *arguments)
    [line] = [line for line in done.stdout.splitlines() if "install.sh" in line]
    assert ("TORCH_INDEX" in line) == bool(given)
    assert (given or "") in line
    assert line.endswith(f"install.sh {extra}")


def test_make_run_installs_what_serving_needs_and_nothing_after_a_setup(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", ".protos"):
        (venv / name).touch()
    lines = make("--dry-run", "run", f"VENV={venv}").stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines if "install.sh" in line] == ["local"]
    (venv / ".serves").touch()
    (venv / ".installed").touch()
    assert "install.sh" not in make("--dry-run", "run", f"VENV={venv}").stdout
    assert "install.sh" not in make("--dry-run", "setup", f"VENV={venv}").stdout


def test_a_virtual_environment_that_could_not_be_made_is_not_there_next_time(
    tmp_path: Path,
) -> None:
    # Debian's Python without python3-venv: it makes bin/python, and finds no pip then.
    without_pip = f"mkdir -p {tmp_path}/venv/bin; touch {tmp_path}/venv/bin/python; exit 1"
    python = f'case "$*" in *venv*) {without_pip} ;; esac'
    path = programs(tmp_path / "bin", python3=python)
    for _ in range(2):
        done = make(f"{tmp_path}/venv/bin/python", f"VENV={tmp_path}/venv", path=path)
        assert done.returncode
        assert "python3-venv" in done.stdout
        assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("strict", "machine_is", "fails"),
    [
        ("", "Linux x86_64", False),
        ("1", "Linux x86_64", True),
        ("1", "Darwin arm64", False),
    ],
)
def test_fuzzing_without_its_guide_fails_where_that_must_be_there(
    tmp_path: Path, strict: str, machine_is: str, fails: bool
) -> None:
    path = programs(
        tmp_path / "bin",
        python='case "$*" in *atheris*) exit 1 ;; esac',
        uv="",
        uname=f"echo {machine_is}",
    )
    done = make(
        "fuzz", "--assume-old=setup", f"BIN={path}", f"UV={path}/uv", f"STRICT={strict}", path=path
    )
    assert bool(done.returncode) == fails
    assert "atheris" in done.stdout


@pytest.mark.parametrize(
    ("compiler", "python", "fails"),
    [
        ("sh", 'case "$*" in *build.py*) exit 1 ;; esac', True),
        ("sh", 'case "$*" in *"runnable()"*) exit 1 ;; esac', True),
        ("sh", "", False),
        ("no-compiler", "exit 1", False),
    ],
    ids=["not built", "not loaded", "built", "no compiler"],
)
def test_native_kernels_must_be_there_where_there_is_a_compiler(
    tmp_path: Path, compiler: str, python: str, fails: bool
) -> None:
    path = programs(tmp_path / "bin", python=python)
    done = make("native", "--assume-old=setup", f"BIN={path}", f"CXX={compiler} -m64")
    assert bool(done.returncode) == fails
