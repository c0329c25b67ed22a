"""Keys sign receipts, any change is caught, and earlier keys still check."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from services.receipts.keys import PublicKeys, SigningKeys, new_key
from tests.receipts.made import KEYS, hidden, signed, unsigned

Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the place and the value of each number, text and null, and of each empty list."""
    if isinstance(value, dict) and value:
        for name, member in value.items():
            yield from leaves(member, (*path, name))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def changed(receipt: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(receipt))
    holder: Any = copy
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return copy


@given(st.data())
def test_one_changed_field_is_caught(data: st.DataObject) -> None:
    prompt = data.draw(st.sampled_from([{"tokens": [1, 2, 3]}, hidden([1, 2, 3])]))
    receipt = json.loads(json.dumps(signed(prompt=prompt)))
    assert KEYS.published.has_signed(receipt)
    path, value = data.draw(st.sampled_from(list(leaves(receipt))))
    other: Any
    if isinstance(value, str):
        at = data.draw(st.integers(0, len(value)))
        letter = data.draw(st.sampled_from("0aZ="))
        other = value[:at] + letter + value[at + data.draw(st.integers(0, 1)) :]
    elif isinstance(value, int | float):
        other = value + data.draw(st.sampled_from([-1, 1, 0.25]))
    else:
        other = data.draw(st.sampled_from(["x", 0, [0]]))
    if other != value:
        assert not KEYS.published.has_signed(changed(receipt, path, other))


@given(st.integers(0, 511), st.data())
def test_one_changed_bit_of_the_signature_is_caught(bit: int, data: st.DataObject) -> None:
    receipt = signed()
    raw = bytearray(base64.b64decode(receipt["signature"]))
    raw[bit // 8] ^= 1 << bit % 8
    assert not KEYS.published.has_signed({**receipt, "signature": base64.b64encode(raw).decode()})


@given(st.sampled_from(sorted(signed())))
def test_a_field_that_is_missing_or_new_is_caught(name: str) -> None:
    receipt = signed()
    assert not KEYS.published.has_signed({**receipt, f"{name}_": 1})
    del receipt[name]
    assert not KEYS.published.has_signed(receipt)


def test_a_receipt_that_was_written_by_another_program_is_right() -> None:
    receipt = json.loads(json.dumps(signed(), indent=3, sort_keys=True))
    assert KEYS.published.has_signed(receipt)


def test_after_a_rotation_both_keys_are_published_and_the_first_signs() -> None:
    earlier = signed()
    public = next(iter(KEYS.published.by_id.values())).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    rotated = SigningKeys.parse(new_key() + public)
    published = PublicKeys.from_jwks(json.loads(json.dumps(rotated.published.to_jwks())))
    assert [*published.by_id] == [rotated.id, KEYS.id]
    assert published.has_signed(earlier)
    assert published.has_signed(rotated.signed(unsigned()))
    assert not KEYS.published.has_signed(rotated.signed(unsigned()))


def _pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no key in PEM"),
        (b"secret", "has no key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", "key 1 cannot be read"),
        (_pem(X25519PrivateKey.generate()), "key 1 is no Ed25519 key"),
        (
            Ed25519PrivateKey.generate()
            .public_key()
            .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "the first key must be a private key",
        ),
    ],
    ids=["empty", "no PEM", "broken", "another kind", "public alone"],
)
def test_a_wrong_key_file_is_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SigningKeys.parse(content)


@pytest.mark.parametrize(
    "document",
    [[], {}, {"keys": [{}]}, {"keys": [{"x": "AA"}]}, {"keys": [{"x": "A" * 43, "kid": "no"}]}],
)
def test_a_wrong_key_set_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="keys"):
        PublicKeys.from_jwks(document)
