"""The page of a `.proto` file: its services, messages and enums with their comments, in Markdown.

A comment is found by the path of what it describes: field numbers and indices from the root of the
file's descriptor to it (`SourceCodeInfo.Location` in protobuf's `descriptor.proto`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

Path = tuple[int, ...]

_MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
_ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
_SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
_SYNTAX = FileDescriptorProto.SYNTAX_FIELD_NUMBER
_FIELDS = DescriptorProto.FIELD_FIELD_NUMBER
_NESTED = DescriptorProto.NESTED_TYPE_FIELD_NUMBER
_NESTED_ENUMS = DescriptorProto.ENUM_TYPE_FIELD_NUMBER
_METHODS = ServiceDescriptorProto.METHOD_FIELD_NUMBER
_VALUES = EnumDescriptorProto.VALUE_FIELD_NUMBER


class ProtoPage:
    """The page of one file. `homes` has the page of each type, by its full name with a leading
    dot."""

    def __init__(self, file: FileDescriptorProto, homes: Mapping[str, str]) -> None:
        self._file = file
        self._homes = homes

    def text(self) -> str:
        """Returns the page in Markdown."""
        parts = [
            f"# `{self._file.name.rpartition('/')[2]}`",
            f"This page is for engineers who use or change `{self._file.package}`. It is made from "
            f"the comments of `protos/{self._file.name}`.",
            self._comment((_SYNTAX,)),
            *self._services(),
            *self._messages(self._file.message_type, (_MESSAGES,), ""),
            *self._enums(self._file.enum_type, (_ENUMS,), ""),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    @cached_property
    def _comments(self) -> dict[Path, str]:
        return {
            tuple(location.path): location.leading_comments.strip()
            for location in self._file.source_code_info.location
        }

    def _comment(self, path: Path) -> str:
        lines = self._comments.get(path, "").splitlines()
        return _escaped("\n".join(line.strip() for line in lines))

    def _services(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            path = (_SERVICES, index)
            yield f"## Service `{service.name}`"
            yield self._comment(path)
            rows = [
                (
                    f"`{method.name}`",
                    self._stream(method.input_type, method.client_streaming),
                    self._stream(method.output_type, method.server_streaming),
                    self._comment((*path, _METHODS, place)),
                )
                for place, method in enumerate(service.method)
            ]
            yield _table(("call", "takes", "answers", "meaning"), rows)

    def _stream(self, type_name: str, is_stream: bool) -> str:
        return ("stream of " if is_stream else "") + self._link(type_name)

    def _messages(
        self, messages: Iterable[DescriptorProto], path: Path, outer: str
    ) -> Iterator[str]:
        for index, message in enumerate(messages):
            if message.options.map_entry:
                continue
            place, name = (*path, index), f"{outer}{message.name}"
            yield _heading(name)
            yield self._comment(place)
            yield self._fields(message, place)
            yield from self._messages(message.nested_type, (*place, _NESTED), f"{name}.")
            yield from self._enums(message.enum_type, (*place, _NESTED_ENUMS), f"{name}.")

    def _fields(self, message: DescriptorProto, path: Path) -> str:
        rows = [
            (
                str(field.number),
                f"`{field.name}`",
                self._type(field, message),
                self._comment((*path, _FIELDS, index)),
            )
            for index, field in enumerate(message.field)
        ]
        return _table(("number", "field", "type", "meaning"), rows)

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entry = _map_entry(field, message)
        if entry is not None:
            key, value = entry.field
            return f"map from {self._scalar(key)} to {self._scalar(value)}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {self._scalar(field)}"
        if field.proto3_optional:
            return f"optional {self._scalar(field)}"
        if field.HasField("oneof_index"):
            return f"{self._scalar(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return self._scalar(field)

    def _scalar(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _link(self, type_name: str) -> str:
        name = type_name.removeprefix(f".{self._file.package}.")
        home = self._homes.get(type_name)
        return f"`{name}`" if home is None else f"[`{name}`]({home}#{anchor(name)})"

    def _enums(self, enums: Iterable[EnumDescriptorProto], path: Path, outer: str) -> Iterator[str]:
        for index, enum in enumerate(enums):
            place, name = (*path, index), f"{outer}{enum.name}"
            yield _heading(f"{name}", kind="Enum ")
            yield self._comment(place)
            rows = [
                (str(value.number), f"`{value.name}`", self._comment((*place, _VALUES, at)))
                for at, value in enumerate(enum.value)
            ]
            yield _table(("number", "value", "meaning"), rows)


def homes(files: Iterable[FileDescriptorProto]) -> dict[str, str]:
    """Returns the page of each message and enum of the files, by the type's full name with a
    leading dot."""
    return {
        f".{file.package}.{name}": page_name(file) for file in files for name in _type_names(file)
    }


def page_name(file: FileDescriptorProto) -> str:
    """Returns the name of a file's page."""
    return file.name.rpartition("/")[2].replace(".proto", ".md")


def anchor(name: str) -> str:
    """Returns the anchor of a type in its page."""
    return name.replace(".", "-")


def _type_names(file: FileDescriptorProto) -> Iterator[str]:
    yield from (enum.name for enum in file.enum_type)
    for message in file.message_type:
        yield from _nested_names(message, message.name)


def _nested_names(message: DescriptorProto, name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{enum.name}" for enum in message.enum_type)
    for nested in message.nested_type:
        yield from _nested_names(nested, f"{name}.{nested.name}")


def _map_entry(field: FieldDescriptorProto, message: DescriptorProto) -> DescriptorProto | None:
    nested = field.type_name.rpartition(".")[2]
    entries = (entry for entry in message.nested_type if entry.options.map_entry)
    return next((entry for entry in entries if entry.name == nested), None)


def _heading(name: str, *, kind: str = "") -> str:
    return f"## {kind}`{name}` {{#{anchor(name)}}}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "No fields."
    lines = [head, ("---",) * len(head), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Returns plain text as Markdown, with what looks like code or HTML shown as it is."""
    for character in "\\`*_{}[]<":
        text = text.replace(character, f"\\{character}")
    return text
