"""What stops a release, and what its list of packages has."""

import hashlib
import platform
import re
import sys
from pathlib import Path

import pytest

from release import provenance
from release.release import MATERIALS, Unreleasable, check_tags, merged_locks, write_checksums
from services.common.version import VERSION

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tags", [[], [f"v{VERSION}"], ["v99.0.0", f"v{VERSION}"]])
def test_a_commit_may_have_no_tag_or_that_of_the_version(tags: list[str]) -> None:
    check_tags(tags)


def test_a_tag_of_another_version_stops_the_release() -> None:
    with pytest.raises(Unreleasable, match=r"v99\.0\.0"):
        check_tags(["v99.0.0"])


@pytest.mark.parametrize("part", ["common", "frontend", "scheduler", "worker"])
def test_each_package_that_is_needed_is_listed_once_by_version(part: str) -> None:
    listed = [line.partition("==")[0] for line in merged_locks().splitlines()]
    assert len(set(listed)) == len(listed)
    needed = (ROOT / "requirements" / f"{part}.in").read_text(encoding="utf-8")
    names = re.findall(r"^[a-z][\w-]*", needed, flags=re.M | re.I)
    assert {name.lower().replace("_", "-") for name in names} <= set(listed)


def test_the_statement_has_what_made_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSS_CXX", sys.executable)
    files = [tmp_path / "b.whl", tmp_path / "a.tgz"]
    for file in files:
        file.write_bytes(file.name.encode())
    made = provenance.statement(
        files, commit="c0ffee", root=ROOT, materials=MATERIALS[:1], machines=["vax"]
    )
    assert [it["name"] for it in made["subject"]] == ["a.tgz", "b.whl"]
    digest = hashlib.sha256(b"a.tgz").hexdigest()
    assert made["subject"][0]["digest"] == {"sha256": digest}
    build = made["predicate"]["buildDefinition"]
    assert build["internalParameters"]["cxx"] == {"vax": f"Python {platform.python_version()}"}
    source, locked = build["resolvedDependencies"]
    assert source == {"name": "source", "digest": {"gitCommit": "c0ffee"}}
    assert (locked["name"], len(locked["digest"]["sha256"])) == ("release/requirements.txt", 64)
    assert all((ROOT / name).is_file() for name in MATERIALS)


def test_digests_are_of_the_files_of_the_release_alone(tmp_path: Path) -> None:
    (tmp_path / "orcinus-1.tgz").write_bytes(b"a chart")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    write_checksums(tmp_path)
    [line] = (tmp_path / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert line.endswith("  orcinus-1.tgz")
