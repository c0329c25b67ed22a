"""Each lock has all that is needed on each Python and machine that the package allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.requirements.locks import (
    REQUIREMENTS,
    ROOT,
    Target,
    entries,
    required,
    requires_python,
    versions,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [
    classifier.rpartition(" ")[2]
    for classifier in PROJECT["classifiers"]
    if re.search(r":: Python :: 3\.\d+$", classifier)
]
TARGETS = [Target(python, machine) for python in PYTHONS for machine in ("x86_64", "aarch64")]
LOCKED = sorted(path.name for path in REQUIREMENTS.glob("*.txt"))
SERVICES = ("common", "frontend", "scheduler", "worker")
OF_TORCH = re.compile(r"torch|triton|(nvidia|cuda)-.*")

each_target = pytest.mark.parametrize("target", TARGETS, ids=str)


def of_services(*names: str) -> list[str]:
    """Returns what services require."""
    return [
        line.partition("#")[0]
        for name in names
        for line in (REQUIREMENTS / f"{name}.in").read_text(encoding="utf-8").splitlines()
        if line.partition("#")[0].strip()
    ]


def of_extra(name: str) -> list[str]:
    """Returns what an extra of the package requires, in place of the package itself."""
    listed = PROJECT["optional-dependencies"][name]
    others = [it for it in listed if canonicalize_name(Requirement(it).name) != "orcinus"]
    own = [extra for it in listed if it not in others for extra in Requirement(it).extras]
    return [*others, *(line for extra in own for line in of_extra(extra))]


ROOTS = {
    "local.txt": of_services(*SERVICES),
    "dev.txt": [*of_services(*SERVICES), *of_extra("dev"), "httpx>=0.27"],
    "frontend.txt": of_services("common", "frontend"),
    "scheduler.txt": of_services("common", "scheduler"),
    "worker-cpu.txt": of_services("common", "worker"),
    "worker-cuda.txt": of_services("common", "worker"),
    "torch.txt": ["torch"],
}
"""What the locks are made from, where all of it is installed here."""


def test_the_versions_of_python_are_those_that_the_package_allows() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}")] == PYTHONS


@pytest.mark.parametrize("name", LOCKED)
def test_each_line_of_a_lock_is_a_package_with_hashes(name: str) -> None:
    assert all(str(entry.specifier).startswith("==") for entry in entries(REQUIREMENTS / name))


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_names_no_index(name: str) -> None:
    text = (REQUIREMENTS / name).read_text(encoding="utf-8")
    assert "make locks" in text.splitlines()[1]
    assert "://" not in text
    assert "index-url" not in text


@each_target
@pytest.mark.parametrize("name", ROOTS)
def test_a_lock_has_all_that_is_required_in_a_version_that_fits(name: str, target: Target) -> None:
    locked = versions(REQUIREMENTS / name, target)
    # What PyTorch needs beside itself is in the lock of PyTorch.
    beside = {} if "torch" in locked else versions(REQUIREMENTS / "torch.txt", target)
    leaves = {it for it in [*locked, *beside] if OF_TORCH.fullmatch(it) and it != "torch"}
    for requirement in required(ROOTS[name], target, leaves):
        package = canonicalize_name(requirement.name)
        if OF_TORCH.fullmatch(package):
            assert package in {**beside, **locked}
        else:
            assert requirement.specifier.contains(locked[package]), f"{requirement}, {target}"


@each_target
@pytest.mark.parametrize("name", LOCKED)
def test_each_package_allows_the_python_that_it_is_locked_for(name: str, target: Target) -> None:
    for package in versions(REQUIREMENTS / name, target):
        allowed = SpecifierSet(requires_python(package))
        assert allowed.contains(target.python), f"{package} needs Python {allowed}"


@each_target
@pytest.mark.parametrize("name", ["local.txt", "dev.txt"])
def test_pytorch_is_not_among_the_packages_beside_it(name: str, target: Target) -> None:
    found = [it for it in versions(REQUIREMENTS / name, target) if OF_TORCH.fullmatch(it)]
    assert found == (["triton"] if name == "dev.txt" else [])


@each_target
def test_what_is_built_here_finds_setuptools_without_looking_for_it(target: Target) -> None:
    for name in ("local.txt", "dev.txt"):
        built_by = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]
        [setuptools] = [Requirement(it) for it in built_by["requires"]]
        assert setuptools.specifier.contains(versions(REQUIREMENTS / name, target)["setuptools"])


def test_a_lock_that_lacks_a_package_or_has_a_wrong_version_is_found(tmp_path: Path) -> None:
    text = (REQUIREMENTS / "frontend.txt").read_text(encoding="utf-8")
    lock = tmp_path / "frontend.txt"
    lock.write_text(text.replace("\nuvicorn==", "\nother=="), encoding="utf-8")
    locked = versions(lock, TARGETS[0])
    needed = {canonicalize_name(it.name) for it in required(ROOTS[lock.name], TARGETS[0], ())}
    assert needed - set(locked) == {"uvicorn"}


def test_all_that_is_tested_together_has_one_version() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    tested = {canonicalize_name(name): version for name, version in pins.items()}
    for name in LOCKED:
        for entry in entries(REQUIREMENTS / name):
            package, version = canonicalize_name(entry.name), str(entry.specifier)[2:]
            assert tested.get(package, version) == version, f"{name}: {package}"
