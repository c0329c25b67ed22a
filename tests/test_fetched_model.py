"""A fetched checkpoint is whole or not there, and its weights are the published ones."""

import hashlib
from pathlib import Path

import pytest

from models.fetched import WEIGHTS, FetchedModel

CONTENT = b"weights"


def model(content: bytes = CONTENT, *, fails: bool = False) -> FetchedModel:
    """A model whose checkpoint has `content` as its weights, or which cannot be fetched."""

    def make(directory: Path) -> Path:
        made = directory / "made"
        made.mkdir()
        (made / WEIGHTS).write_bytes(content)
        if fails:
            raise OSError("no network")
        return made

    return FetchedModel(
        name="tiny",
        module="models.tiny",
        weights_sha256=hashlib.sha256(CONTENT).hexdigest(),
        make=make,
    )


def test_a_checkpoint_is_fetched_once(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "tiny"
    assert model().fetch(directory) == directory
    assert model(fails=True).fetch(directory) == directory
    assert (directory / WEIGHTS).read_bytes() == CONTENT
    assert [*directory.parent.iterdir()] == [directory]


def test_a_checkpoint_that_is_not_complete_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no network"):
        model(fails=True).fetch(tmp_path / "tiny")
    assert not [*tmp_path.iterdir()]


def test_other_weights_are_refused_when_made_and_when_found(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    with pytest.raises(ValueError, match=r"has the SHA-256 .* run `python -m models\.tiny` again"):
        model(b"other").fetch(directory)
    assert not directory.exists()
    model().fetch(directory)
    (directory / WEIGHTS).write_bytes(b"other")
    with pytest.raises(ValueError, match=f"delete {directory} and"):
        model().fetch(directory)


def test_the_cache_of_the_user_has_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert model().default_directory() == Path("/cache/orcinus/tiny")
