"""The pages of reference have all that OpenAPI and the protos describe, and their links lead
somewhere."""

import re
from functools import cache

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from website.reference.__main__ import described, http_pages, proto_pages
from website.reference.proto_page import anchor, page_name

PROTOS = [
    "inference.md",
    "logprobs.md",
    "sampling.md",
    "scheduler.md",
    "trace.md",
    "watch.md",
    "worker.md",
]


@cache
def pages() -> dict[str, str]:
    return http_pages() | proto_pages()


@cache
def file_of(page: str) -> FileDescriptorProto:
    [file] = [file for file in described().file if page_name(file) == page]
    return file


def anchors(page: str) -> set[str]:
    return set(re.findall(r"^#+ .*\{#([\w-]+)\}$", pages()[page], flags=re.M))


def section(page: str, name: str) -> str:
    """Returns the part of a page below the heading with an anchor."""
    return pages()[page].partition(f"{{#{name}}}\n")[2].partition("\n## ")[0]


def test_each_proto_has_a_page() -> None:
    assert sorted(proto_pages()) == PROTOS


@pytest.mark.parametrize("page", PROTOS)
def test_a_page_has_every_call_message_field_and_value_with_a_meaning(page: str) -> None:
    file = file_of(page)
    for service in file.service:
        for method in service.method:
            assert re.search(rf"^\| `{method.name}` \|.* \| \S.*\S \|$", pages()[page], flags=re.M)
    for message in file.message_type:
        check_message(page, message, message.name)
    for enum in file.enum_type:
        names = [f"`{value.name}`" for value in enum.value]
        assert re.findall(r"^\| \d+ \| (`\w+`)", section(page, enum.name), flags=re.M) == names


def check_message(page: str, message: DescriptorProto, name: str) -> None:
    """Checks that the section of a message has its fields, and sections of its nested messages."""
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \| \S.* \| \S.* \|$", section(page, anchor(name)), flags=re.M
    )
    assert rows == [(str(field.number), field.name) for field in message.field]
    for nested in message.nested_type:
        if not nested.options.map_entry:
            check_message(page, nested, f"{name}.{nested.name}")


@pytest.mark.parametrize("page", PROTOS)
def test_types_link_to_their_sections(page: str) -> None:
    links = re.findall(r"\]\((\w+\.md)#([\w-]+)\)", pages()[page])
    assert [(to, name) for to, name in links if name not in anchors(to)] == []


def test_the_page_of_http_has_all_paths_and_its_types_link_to_their_sections() -> None:
    page = pages()["http.md"]
    assert "### `POST /v1/chat/completions`" in page
    assert "<code>max_tokens</code>" in page
    links = set(re.findall(r'href="#(\w+)"', page))
    assert len(links) > 50
    assert links <= anchors("http.md")
