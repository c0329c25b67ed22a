"""Damage to the tensors of safetensors files, and to the headers of these files."""

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.damaged.file_damage import ODD, Damage
from tests.fuzz.damaged.originals import Files

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "I16": 2, "I8": 1,
          "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}  # fmt: skip
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


def _weights(files: Files, dice: Random) -> str | None:
    names = sorted(name for name in files if name.endswith(".safetensors"))
    return dice.choice(names) if names else None


Tensors = dict[str, tuple[str, list[int], bytes]]


def take_apart(content: bytes) -> Tensors:
    """Returns the tensors of a file: their element types, shapes and bytes."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {
        name: (said["dtype"], said["shape"], data[slice(*said["data_offsets"])])
        for name, said in header.items()
    }


def put_together(tensors: Tensors) -> bytes:
    """Returns a file that holds tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        places = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}
        data += content
    return _file(header, data)


def _file(header: Any, data: bytes, length: int | None = None) -> bytes:
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def of_tensors(change: Callable[[Tensors, Random], str | None]) -> Damage:
    """Returns the damage that changes the tensors of a file, which stays a valid one."""

    def damage(files: Files, dice: Random) -> str | None:
        name = _weights(files, dice)
        if name is None:
            return None
        tensors = take_apart(files[name])
        said = change(tensors, dice)
        files[name] = put_together(tensors)
        return said and f"{name}: {said}"

    return damage


def lose_tensor(tensors: Tensors, dice: Random) -> str:
    name = dice.choice(sorted(tensors))
    del tensors[name]
    return f"{name} is missing"


def rename_tensor(tensors: Tensors, dice: Random) -> str:
    name = dice.choice(sorted(tensors))
    new = dice.choice([f"{name}.old", name[1:], name.replace(".0.", ".1."), f"module.{name}", ""])
    tensors[new] = tensors.pop(name)
    return f"{name} is {new}"


def copy_tensor(tensors: Tensors, dice: Random) -> str | None:
    name, other = dice.choice(sorted(tensors)), dice.choice(sorted(tensors))
    new = dice.choice([f"{name}.old", name.replace(".0.", ".7."), f"other.{name}"])
    if new in tensors:
        return None
    tensors[new] = tensors[other]
    return f"{other} is also {new}"


def reshape(tensors: Tensors, dice: Random) -> str:
    name = dice.choice(sorted(tensors))
    dtype, shape, content = tensors[name]
    n = 1
    for size in shape:
        n *= size
    new = dice.choice([shape[::-1], [n], [1, *shape], [*shape, 1], [n, 1]])
    tensors[name] = dtype, new, content
    return f"{name} has shape {new} instead of {shape}"


def resize(tensors: Tensors, dice: Random) -> str | None:
    name = dice.choice(sorted(tensors))
    dtype, shape, content = tensors[name]
    if not shape or shape[0] < 2:
        return None
    row = len(content) // shape[0]
    n_rows = dice.choice([shape[0] - 1, shape[0] + 1, 0, shape[0] // 2, 2 * shape[0]])
    tensors[name] = dtype, [n_rows, *shape[1:]], (content * 3)[: n_rows * row]
    return f"{name} has {n_rows} rows instead of {shape[0]}"


def retype(tensors: Tensors, dice: Random) -> str | None:
    name = dice.choice(sorted(tensors))
    dtype, shape, content = tensors[name]
    new = dice.choice(sorted(_SIZES))
    has_scales = any("scale" in each or "qzeros" in each for each in tensors)
    if has_scales and {new, dtype} <= _FLOATS:
        return None  # other numbers, of which none is wrong
    n = len(content) // _SIZES[dtype]
    tensors[name] = new, shape, (content * 8)[: n * _SIZES[new]]
    return f"{name} is {new} instead of {dtype}"


def swap_tensors(tensors: Tensors, dice: Random) -> str | None:
    one = dice.choice(sorted(tensors))
    others = [name for name in sorted(tensors) if tensors[name][:2] == tensors[one][:2]]
    other = dice.choice(others)
    if one == other or "weight_shape" in one:
        return None
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return f"{one} and {other} are swapped"


_NOT_FINITE = {
    "F32": [b"\0\0\xc0\x7f", b"\0\0\x80\x7f"], "F16": [b"\0\x7e", b"\0\x7c"],
    "BF16": [b"\xc0\x7f", b"\x80\x7f"], "F64": [b"\0\0\0\0\0\0\xf8\x7f"],
}  # fmt: skip


def spoil(tensors: Tensors, dice: Random) -> str | None:
    """Puts a number that is none among the scales, or among any floats."""
    floats = [name for name in sorted(tensors) if tensors[name][0] in _NOT_FINITE]
    scales = [name for name in floats if "scale" in name]
    if not floats:
        return None
    name = dice.choice(scales if scales and dice.random() < 0.8 else floats)
    dtype, shape, content = tensors[name]
    wrong = dice.choice(_NOT_FINITE[dtype])
    if len(content) < len(wrong):
        return None
    if dice.random() < 0.5:
        tensors[name] = dtype, shape, wrong * (len(content) // len(wrong))
    else:
        at = dice.randrange(len(content) // len(wrong)) * len(wrong)
        tensors[name] = dtype, shape, content[:at] + wrong + content[at + len(wrong) :]
    return f"{name} has numbers that are none"


def lying_header(files: Files, dice: Random) -> str | None:
    """Changes a field in the header of a weight file, or in the description of a tensor."""
    name = _weights(files, dice)
    if name is None:
        return None
    content = files[name]
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    tensor = dice.choice([each for each in sorted(header) if each != "__metadata__"])
    said, data = header[tensor], content[8 + length :]
    begin, end = said["data_offsets"]
    lies: list[dict[str, Any]] = [
        {"data_offsets": [end, begin]}, {"data_offsets": [begin, end + 8]},
        {"data_offsets": [-8, end]}, {"data_offsets": [begin, 2**63]}, {"data_offsets": [0]},
        {"data_offsets": [begin + 1, end + 1]}, {"shape": [-size for size in said["shape"]]},
        {"shape": [2**62, 4]}, {"shape": "many"}, {"shape": [2**40]}, {"shape": [0]},
        {"dtype": "F31"}, {"dtype": None}, {"dtype": "F8_E4M3"}, {"dtype": 5},
    ]  # fmt: skip
    kind = dice.randrange(4)
    if kind:
        lie = dice.choice(lies)
        header[tensor] |= lie
        files[name] = _file(header, data)
        return f"{name}: {tensor} {lie}"
    length = dice.choice([0, 1, 2**63, 2**64 - 1, 10**8, length + 8, length - 8, len(content)])
    files[name] = _file(header, data, length)
    return f"{name}: header of {length} bytes"


def huge_header(files: Files, dice: Random) -> str | None:
    """Makes a header long or deep."""
    name = _weights(files, dice)
    if name is None:
        return None
    (length,) = struct.unpack_from("<Q", files[name])
    data = files[name][8 + length :]
    header: Any = json.loads(files[name][8 : 8 + length])
    kind = dice.choice(["deep", "long name", "many", "metadata"])
    if kind == "deep":
        encoded = b"[" * 100_000
        files[name] = struct.pack("<Q", len(encoded)) + encoded + data
        return f"{name}: header of brackets"
    if kind == "long name":
        header["x" * 100_000] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == "many":
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header |= {f"a{i}": empty for i in range(2000)}
    else:
        header["__metadata__"] = {"a": dice.choice(ODD)}
    files[name] = _file(header, data)
    return f"{name}: header with {kind}"


def duplicate(files: Files, dice: Random) -> str | None:
    """Copies a file of weights to another name, whole or with a tensor that is another."""
    name = _weights(files, dice)
    if name is None:
        return None
    tensors = take_apart(files[name])
    tensor = dice.choice(sorted(tensors))
    dtype, shape, content = tensors[tensor]
    tensors[tensor] = dtype, shape, bytes(len(content))
    new = dice.choice(["a.safetensors", "model-00009-of-00009.safetensors", "adapter.safetensors"])
    files[new] = put_together({tensor: tensors[tensor]})
    return f"{new} has {tensor}, too"
