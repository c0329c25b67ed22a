"""What stands in front of a GGUF file's tensors, and files that lie about it."""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from services.common.gguf.header import is_gguf, model_name, read_header


def write(path: Path) -> Path:
    """Writes a file with a value of each kind and two tensors."""
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("yes", True)
    writer.add_int64("large", -(2**40))
    writer.add_string("text", "größer")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.ones(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_places_are_those_that_were_written(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "a.gguf"))
    said = header.metadata
    assert said["general.architecture"] == "llama"
    assert (said["llama.block_count"], said["yes"], said["large"]) == (3, True, -(2**40))
    assert (said["text"], said["texts"]) == ("größer", ["a", "", "ü"])
    assert (list(said["numbers"]), list(said["floats"])) == ([1, -2, 3], [0.25, -1.5])
    assert (header.tensors["a"].shape, header.tensors["b"].shape) == ((2, 3), (4,))
    assert header.tensors["a"].offset % 64 == header.tensors["b"].offset % 64 == 0
    assert header.floats("a") == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="b is no small tensor of float32"):
        header.floats("b")


@pytest.mark.parametrize("offset", [2**63, 2**64 - 64, 4096])
def test_a_tensor_that_is_nowhere_is_a_value_error(tmp_path: Path, offset: int) -> None:
    name = b"rope_freqs.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 4, 0, offset)
    file = tmp_path / "a.gguf"
    file.write_bytes(head(1, 0) + tensor + bytes(64))
    with pytest.raises(ValueError, match="ends inside rope_freqs"):
        read_header(file).floats("rope_freqs.weight")


def test_a_model_is_named_after_its_file(tmp_path: Path) -> None:
    file = write(tmp_path / "Model-1.5.Q4_K_M.gguf")
    assert (is_gguf(file), is_gguf(tmp_path)) == (True, False)
    assert model_name(file) == "Model-1.5.Q4_K_M"
    assert model_name(tmp_path) == tmp_path.name


def head(n_tensors: int, n_keys: int, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = struct.pack("<Q", 2**63)
BROKEN = {
    "empty": (b"", "ends inside its metadata"),
    "another-format": (b"PK\3\4" + bytes(40), "is no GGUF file"),
    "version-1": (head(0, 0, version=1), "version 1 of GGUF"),
    "other-byte-order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "many-tensors": (head(2**60, 0), "tensors"),
    "many-keys": (head(0, 2**60), "keys"),
    "long-key": (head(0, 1) + HUGE, "ends inside"),
    "long-text": (head(0, 1) + key(b"a", 8, HUGE), "ends inside"),
    "long-list": (head(0, 1) + key(b"a", 9, struct.pack("<I", 4) + HUGE), "ends inside"),
    "long-list-of-texts": (head(0, 1) + key(b"a", 9, struct.pack("<I", 8) + HUGE), "ends inside"),
    "list-of-lists": (head(0, 1) + key(b"a", 9, struct.pack("<IQ", 9, 1)), "type 9"),
    "unknown-type": (head(0, 1) + key(b"a", 99, b""), "unknown type 99"),
    "many-dimensions": (head(1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 5), "5 dim"),
    "alignment": (
        head(0, 1) + key(b"general.alignment", 4, struct.pack("<I", 0)),
        "general.alignment is 0",
    ),
}


@pytest.mark.parametrize(("content", "named"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_header(file)


def test_a_file_that_ends_anywhere_in_front_of_its_tensors_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    end = read_header(tmp_path / "a.gguf").tensors["a"].offset - 64
    for n_bytes in range(0, end, 7):
        (tmp_path / "b.gguf").write_bytes(content[:n_bytes])
        with pytest.raises(ValueError, match="ends inside its metadata"):
            read_header(tmp_path / "b.gguf")


@given(place=st.integers(4, 500), byte=st.integers(0, 255))
def test_a_changed_byte_is_a_value_error_at_worst(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    file = write(tmp_path_factory.mktemp("gguf") / "a.gguf")
    content = bytearray(file.read_bytes())
    content[place % len(content)] = byte
    file.write_bytes(content)
    with suppress(ValueError):
        read_header(file)
