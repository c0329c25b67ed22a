"""Promises of every image, read from the Dockerfile; building them is for a cluster's tests."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from services.common.settings import PREFIX, ServerSettings
from services.common.version import VERSION
from services.frontend.settings import FrontendSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tests.images.dockerfile import ROOT, Stage, assignments, exec_form, lineage, read_stages
from tests.requirements.locks import entries

STAGES = read_stages()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETTINGS: dict[str, type[ServerSettings]] = {
    "frontend": FrontendSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
IMAGES = [*SETTINGS, "demo-model"]
LABELS = ["title", "description", "licenses", "version", "revision", "created"]


def image(name: str) -> Stage:
    return lineage(STAGES, name)


def copied_packages(service: str) -> list[str]:
    """Returns the directories of Python in the context that the service's image gets."""
    sources = [text.split()[0] for text in image(f"{service}-code").all_of("COPY")]
    return sorted(source for source in sources if (ROOT / source).is_dir())


@cache
def imports_of(package: str) -> set[str]:
    """Every absolute name that the package's modules import."""
    names = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def installed_for(service: str) -> set[str]:
    """Names of all distributions that the service's requirements lead to."""
    waiting = [*requirements("common"), *requirements(service)]
    found: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = normalised(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if name not in found and "extra ==" not in requirement:
            found.add(name)
            waiting += requires(name)
    return found


def requirements(name: str) -> list[str]:
    """Returns the lines of a file of requirements that name a distribution."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def requires(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # it is for another platform
        return []


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("name", IMAGES)
def test_each_image_is_made_from_the_slim_python(name: str) -> None:
    assert image(name).base == "${BASE}"
    base, _, digest = assignments(STAGES[""].all_of("ARG"))["BASE"].partition("@")
    assert base == f"python:{PROJECT['requires-python'].partition(',')[0].removeprefix('>=')}-slim"
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)


@pytest.mark.parametrize("name", IMAGES)
def test_each_image_runs_as_a_numbered_user_without_rights(name: str) -> None:
    assert image(name).all_of("USER") == ["65532:65532"]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_is_the_first_process_and_no_shell(service: str) -> None:
    (entry_point,) = image(service).all_of("ENTRYPOINT")
    command = ["env", "--block-signal=TERM", "python", "-m", f"services.{service}"]
    assert exec_form(entry_point) == command


def test_the_demo_model_copies_itself_to_its_argument() -> None:
    (entry_point,) = image("demo-model").all_of("ENTRYPOINT")
    assert exec_form(entry_point)[0] == "cp"
    (copy,) = image("demo-model").all_of("COPY")
    assert f"{copy.split()[-1]}/." == exec_form(entry_point)[-1]


@pytest.mark.parametrize("service", SETTINGS)
def test_health_is_asked_where_it_is_told(service: str) -> None:
    (check,) = image(service).all_of("HEALTHCHECK")
    command = exec_form(check[check.index("CMD") + len("CMD") :])
    assert command[:3] == ["python", "-m", "services.common.healthcheck"]
    port = command[3].rpartition(":")[2]
    told = assignments(image(service).all_of("ENV"))["ORCINUS_HEALTH_ADDRESS"]
    assert told.endswith(f":{port}")
    assert port in " ".join(image(service).all_of("EXPOSE")).split()


@pytest.mark.parametrize("service", SETTINGS)
def test_nothing_is_written_to_the_root_file_system(service: str) -> None:
    environment = assignments(image(service).all_of("ENV"))
    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("service", SETTINGS)
def test_settings_in_an_image_exist_and_its_ports_are_exposed(service: str) -> None:
    environment = assignments(image(service).all_of("ENV"))
    settings = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    fields = SETTINGS[service].model_fields
    assert {name.removeprefix(PREFIX).lower() for name in settings} <= set(fields)
    defaults = {
        f"{PREFIX}{name}".upper(): field.default
        for name, field in fields.items()
        if name == "address" or name.endswith("_address")
    }
    ports = {str(value).rpartition(":")[2] for value in (defaults | settings).values() if value}
    exposed = set(" ".join(image(service).all_of("EXPOSE")).split())
    assert {port for port in ports if port.isdecimal()} == exposed


@pytest.mark.parametrize("name", IMAGES)
def test_each_image_says_what_it_is(name: str) -> None:
    labels = assignments(image(name).all_of("LABEL"))
    assert list(labels) == [f"org.opencontainers.image.{label}" for label in LABELS]
    assert labels["org.opencontainers.image.title"] == f"orcinus/{name}"
    for label in ("version", "revision", "created"):
        assert labels[f"org.opencontainers.image.{label}"] == f"${label.upper()}"
    assert assignments(image(name).all_of("ARG"))["VERSION"] == VERSION


@pytest.mark.parametrize("name", [name for name in STAGES if name])
def test_what_pip_installs_is_known_by_its_hash_or_is_torch_by_its_version(name: str) -> None:
    for command in STAGES[name].all_of("RUN"):
        for install in re.findall(r"pip [^&;]*\binstall [^&;]*", command):
            if install.rstrip().endswith(" torch"):
                assert re.search(r" -c \S*constraints\.txt .*--no-deps ", install)
            else:
                assert re.search(r" --require-hashes -r \S+$", install.rstrip())


LOCKS = ("frontend.txt", "scheduler.txt", "worker-cpu.txt", "worker-cuda.txt")


def test_every_list_of_requirements_is_one_of_an_image_or_of_a_checkout() -> None:
    of_a_checkout = {"local.txt", "dev.txt", "torch.txt"}
    assert {path.name for path in (ROOT / "requirements").glob("*.txt")} == {
        *LOCKS,
        *of_a_checkout,
        "protos.txt",
        "sbom.txt",
    }


@pytest.mark.parametrize("file", LOCKS)
def test_only_the_image_for_gpus_is_given_pytorch_by_its_lock(file: str) -> None:
    of_cuda = re.compile(r"triton|torch|(nvidia|cuda)-.*")
    names = {normalised(entry.name) for entry in entries(ROOT / "requirements" / file)}
    assert any(of_cuda.fullmatch(name) for name in names) == (file == "worker-cuda.txt")


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_says_what_is_installed_in_it(service: str) -> None:
    listing = lineage(STAGES, f"{service}-sbom")
    assert STAGES[f"{service}-sbom"].base == STAGES[service].base == f"{service}-venv"
    (command,) = STAGES[f"{service}-sbom"].all_of("RUN")
    assert command.endswith("-o /sbom.cdx.json /venv/bin/python")
    assert "cyclonedx-py environment" in command
    assert f"--from={service}-sbom /sbom.cdx.json /" in STAGES[service].all_of("COPY")
    assert listing.all_of("COPY")[-1] == "--from=sbom /sbom /sbom"


def test_only_a_worker_for_gpus_has_a_compiler_which_triton_needs() -> None:
    installs = {
        name: [run for run in image(name).all_of("RUN") if "apt-get" in run] for name in IMAGES
    }
    (install,) = installs.pop("worker")
    assert install.startswith('if [ "$DEVICE" = cuda ]; then')
    assert "install --yes --no-install-recommends gcc libc6-dev" in install
    assert not any(installs.values())


@pytest.mark.parametrize("service", SETTINGS)
def test_code_comes_after_everything_that_takes_long(service: str) -> None:
    copies = [(name, rest) for name, rest in image(service).instructions if name in {"RUN", "COPY"}]
    assert copies[-1] == ("COPY", f"--from={service}-code /app /app")


@pytest.mark.parametrize("service", SETTINGS)
def test_an_image_holds_its_service_and_all_that_it_imports(service: str) -> None:
    packages = copied_packages(service)
    kernels = ["kernels"] if service == "worker" else []
    grammar = [] if service == "scheduler" else ["services/grammar"]
    beside = ["services/console", "services/hub", "services/receipts"]
    others = beside if service == "frontend" else []
    own = ["services/common", f"services/{service}"]
    assert packages == sorted([*kernels, *grammar, *own, *others])
    known = {package.replace("/", ".") for package in packages} | {"orcinus.v1"}
    for package in packages:
        for name in imports_of(package):
            if name.split(".")[0] in {"services", "kernels", "orcinus"}:
                assert any(name == one or name.startswith(f"{one}.") for one in known), name


@pytest.fixture(scope="module")
def distributions() -> Mapping[str, list[str]]:
    """Returns the distributions that each package comes from."""
    return importlib.metadata.packages_distributions()


@pytest.mark.parametrize("service", SETTINGS)
def test_requirements_cover_what_is_imported(
    service: str, distributions: Mapping[str, list[str]]
) -> None:
    installed = installed_for(service)
    # PyTorch's build for GPUs brings Triton, and without it `kernels.triton` is not imported.
    own = {"services", "kernels", "orcinus", "triton"}
    for package in copied_packages(service):
        for name in imports_of(package):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in own or top not in distributions:
                continue
            assert installed & {normalised(one) for one in distributions[top]}, name


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_only_the_worker_has_torch(service: str) -> None:
    assert "torch" not in installed_for(service)
    assert "torch" in installed_for("worker")


def test_the_builder_is_sent_only_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    allowed = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    assert patterns[0] == "*"
    assert patterns.index("*") < patterns.index(f"!{allowed[0]}")
    sources = {
        source
        for stage in STAGES.values()
        for copy in stage.all_of("COPY")
        if not copy.startswith("--from")
        for name in copy.split()[:-1]
        for source in (name.replace("$DEVICE", device) for device in ("cpu", "cuda"))
    }
    assert all((ROOT / source).exists() for source in sources)

    def meets(one: str, other: str) -> bool:
        return Path(one).is_relative_to(other) or Path(other).is_relative_to(one)

    assert [one for one in sources if not any(meets(one, other) for other in allowed)] == []
    assert [one for one in allowed if not any(meets(one, other) for other in sources)] == []
