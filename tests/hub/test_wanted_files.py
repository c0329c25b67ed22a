"""The files of a repository that are fetched, and those that are left."""

from services.hub.wanted_files import wanted


def test_the_file_that_says_how_vectors_are_made_is_fetched() -> None:
    fetched = ["config.json", "modules.json", "model.safetensors", "1_Pooling/config.json"]
    left = ["onnx/config.json", "onnx/model.onnx", "a/1_Pooling/config.json", "1_Pooling/README.md"]
    assert sorted(wanted(dict.fromkeys([*fetched, *left], 1))) == sorted(fetched)
