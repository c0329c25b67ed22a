"""Receipts are found in receipts, lines, answers and saved streams."""

import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from services.verify.receipt_files import NoReceipts, receipts_in
from tests.receipts.made import signed

ONE, TWO = (json.loads(json.dumps(signed(id=name))) for name in ("a-0", "b-0"))


def chunk(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


FORMS = {
    "one receipt": json.dumps(ONE, indent=2) + "\n" + "",
    "a list": json.dumps([ONE, TWO]),
    "lines": f"{json.dumps(ONE)}\n\n{json.dumps(TWO)}\n",
    "an answer": json.dumps({"choices": [{"receipt": ONE}, {"receipt": TWO}], "usage": {}}),
    "answers in lines": "\n".join(json.dumps({"receipt": it}) for it in (ONE, TWO)),
    "gRPC": json.dumps({"choices": [{"receipt": rfc8785.dumps(it).decode()} for it in (ONE, TWO)]}),
    "a stream": ": hello\n"
    + chunk(text="x")
    + "id: 1-2\n"
    + chunk(receipt=ONE)
    + "event: message_delta\n"
    + chunk(receipt=TWO)
    + "data: [DONE]\n",
}


@pytest.mark.parametrize(("name", "text"), FORMS.items(), ids=FORMS)
def test_receipts_are_found_in_order(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    found = receipts_in(file)
    expected = [ONE] if name == "one receipt" else [ONE, TWO]
    assert [it.content for it in found] == expected
    assert [it.place for it in found] == [f"{file}:{n}" for n in range(1, len(expected) + 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f'{json.dumps(ONE)}\n\n{{"type": "orcinus.receipt "}}\n', "line 3 has no receipt"),
        (json.dumps([ONE, {}]), "item 2 has no receipt"),
    ],
    ids=["line", "item"],
)
def test_a_missing_receipt_is_reported(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    first, second = receipts_in(file)
    assert (first.content, first.complaint) == (ONE, "")
    assert (second.content, second.complaint, second.place) == ({}, complaint, f"{file}:2")


TWICE = '{"type": "orcinus.receipt", "tokens": [9], "tokens": [1]}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (TWICE.encode(), "an object has the key 'tokens' twice"),
        (f"{json.dumps(ONE)}\n{TWICE}".encode(), "line 2: an object has the key 'tokens' twice"),
        (json.dumps({"receipt": TWICE}).encode(), "has the key 'tokens' twice"),
        (b"", "has no receipt"),
        (b'{"type": "other"}', "has no receipt"),
        (b'{"a": 1}\n{"b"\n', "line 2 is no JSON"),
        (b"\xff\xfe", "decode"),
        (b"[" * 100_000, "file"),
    ],
    ids=[
        "twice",
        "twice in a line",
        "twice in a text",
        "empty",
        "other objects",
        "broken line",
        "no text",
        "deep",
    ],
)
def test_a_file_without_receipts_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(NoReceipts, match=complaint) as caught:
        receipts_in(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoReceipts, match="No such file"):
        receipts_in(tmp_path / "none")
