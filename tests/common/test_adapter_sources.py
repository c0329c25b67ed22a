"""Which sources of adapters a setting allows."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from services.common.adapter_sources import (
    MAX_SOURCE_BYTES,
    AdapterSources,
    SourceRefused,
    check_inside,
    directory_of,
)


class Settings(BaseModel):
    """Settings with allowed sources."""

    allowed: AdapterSources = ()


def test_prefixes_are_separated_by_commas() -> None:
    assert Settings.model_validate({"allowed": "/a, /b/c"}).allowed == ("/a", "/b/c")
    assert Settings.model_validate({"allowed": ""}).allowed == ()
    assert Settings.model_validate({"allowed": ["/a", "/b"]}).allowed == ("/a", "/b")


@pytest.mark.parametrize(
    "prefix", ["a", "./a", "/", "//", "/a/..", "acme/", "s3://bucket/adapters"]
)
def test_a_prefix_is_an_absolute_directory(prefix: str) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"allowed": prefix})


def test_whole_parts_of_paths_are_compared_after_links(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "allowed-not"
    (allowed / "law").mkdir(parents=True)
    other.mkdir()
    (allowed / "link").symlink_to(other)
    (tmp_path / "way-in").symlink_to(allowed)
    prefixes = [str(allowed)]
    assert directory_of(str(allowed / "law"), prefixes) == allowed / "law"
    assert directory_of(str(tmp_path / "way-in" / "law"), prefixes) == allowed / "law"
    assert directory_of(str(other / ".." / "allowed" / "law"), prefixes) == allowed / "law"
    for source in (
        other,
        allowed / "link",
        allowed / ".." / "allowed-not",
        allowed / "link" / ".." / "allowed-not",
        tmp_path,
    ):
        with pytest.raises(SourceRefused, match="is not below"):
            directory_of(str(source), prefixes)
    (allowed / "law" / "adapter_config.json").symlink_to(other / "secret")
    with pytest.raises(SourceRefused):
        check_inside(allowed / "law" / "adapter_config.json", prefixes)


def test_a_link_that_leads_to_itself_is_not_followed(tmp_path: Path) -> None:
    loop = tmp_path / "allowed" / "loop"
    loop.parent.mkdir()
    loop.symlink_to(loop)
    assert check_inside(loop, [str(loop.parent)]) == loop
    assert not directory_of(str(loop), [str(loop.parent)]).is_dir()
    for source in (loop / ".." / ".." / "..", loop / ".." / ".." / "other"):
        with pytest.raises(SourceRefused, match="is not below"):
            directory_of(str(source), [str(loop.parent)])


@pytest.mark.parametrize("source", ["acme/law", "s3://bucket/law", "law", ""])
def test_other_sources_are_refused_in_words(source: str) -> None:
    with pytest.raises(SourceRefused, match="workers fetch nothing from a hub"):
        directory_of(source, ["/adapters"])


@pytest.mark.parametrize("source", ["/a\0b", "/a/b\nINFO", "/a/\ud800"])
def test_a_source_can_be_printed_in_one_line(source: str) -> None:
    with pytest.raises(SourceRefused, match="cannot be printed"):
        directory_of(source, ["/a"])


def test_a_source_has_a_largest_size() -> None:
    with pytest.raises(SourceRefused, match="exceeds"):
        directory_of("/a/" + "\u00e9" * (MAX_SOURCE_BYTES // 2), ["/a"])
