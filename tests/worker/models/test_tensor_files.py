"""Views of a checkpoint's tensor files."""

from typing import Any
from unittest.mock import Mock

import pytest

from services.worker.models.gguf_file import GgufFile
from services.worker.models.tensor_files import TensorFiles, TensorFilesView

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "find": ("a",),
    "header": ("a",),
    "read": ("a", [range(2)]),
}
PROPERTIES = [name for name, member in vars(TensorFiles).items() if isinstance(member, property)]
METHODS = [
    name for name in vars(TensorFiles) if not name.startswith("_") and name not in PROPERTIES
]


@pytest.mark.parametrize("name", METHODS)
def test_a_view_forwards_every_method(name: str) -> None:
    files, arguments = Mock(GgufFile), ARGUMENTS.get(name, ())
    found = getattr(TensorFilesView(files), name)(*arguments)
    getattr(files, name).assert_called_once_with(*arguments)
    assert found is (None if name == "close" else getattr(files, name).return_value)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_view_forwards_every_property(name: str) -> None:
    files = Mock(GgufFile)
    assert getattr(TensorFilesView(files), name) is getattr(files, name)
