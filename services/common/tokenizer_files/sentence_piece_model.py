"""The protobuf message in the file of a SentencePiece model, with only the fields from which a
tokenizer is made.

The fields are defined in https://github.com/google/sentencepiece/blob/master/src/
sentencepiece_model.proto; other fields of a file are skipped. The message is declared here and not
in a `.proto`, because it is a file format and is not sent between processes.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "orcinus.sentencepiece"
_Field = descriptor_pb2.FieldDescriptorProto

# The fields of each message: name, number, type and default.
_MESSAGES: dict[str, list[tuple[str, int, str, str]]] = {
    "Piece": [
        ("piece", 1, "string", ""),
        ("score", 2, "float", ""),
        ("type", 3, "int32", "1"),
    ],
    "TrainerSpec": [
        ("model_type", 3, "int32", "1"),
        ("byte_fallback", 35, "bool", ""),
        ("unk_id", 40, "int32", "0"),
        ("bos_id", 41, "int32", "1"),
        ("eos_id", 42, "int32", "2"),
        ("pad_id", 43, "int32", "-1"),
    ],
    "NormalizerSpec": [
        ("precompiled_charsmap", 2, "bytes", ""),
        ("add_dummy_prefix", 3, "bool", "true"),
        ("remove_extra_whitespaces", 4, "bool", "true"),
    ],
    "ModelProto": [
        ("pieces", 1, "Piece", "repeated"),
        ("trainer_spec", 2, "TrainerSpec", ""),
        ("normalizer_spec", 3, "NormalizerSpec", ""),
    ],
}


def _declared() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="orcinus/sentencepiece.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            added = message.field.add(name=field, number=number, label=_Field.LABEL_OPTIONAL)
            if kind in _MESSAGES:
                added.type = _Field.TYPE_MESSAGE
                added.type_name = f".{_PACKAGE}.{kind}"
            else:
                added.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
            if default == "repeated":
                added.label = _Field.LABEL_REPEATED
            elif default:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{_PACKAGE}.ModelProto")
    return message_factory.GetMessageClass(found)


ModelProto: Any = _declared()
"""The Python class of the message."""
