"""The version stands in one place, and what cannot read it there says the same."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import yaml

from services.common.version import VERSION

ROOT = Path(__file__).parents[1]


def test_the_package_has_the_version() -> None:
    assert importlib.metadata.version("orcinus") == VERSION


def test_pods_are_labelled_with_the_version() -> None:
    base = yaml.safe_load((ROOT / "k8s" / "base" / "kustomization.yaml").read_text("utf-8"))
    [labels] = base["labels"]
    assert labels["pairs"]["app.kubernetes.io/version"] == VERSION


def test_the_changes_begin_with_what_is_unreleased_and_have_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first, *versions = re.findall(r"^## (\S+)", text, flags=re.M)
    assert first == "Unreleased"
    assert versions[0] == VERSION


def test_a_tag_of_a_release_names_the_version() -> None:
    tags = subprocess.check_output(
        ["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, text=True
    ).split()
    assert set(tags) <= {f"v{VERSION}"}
