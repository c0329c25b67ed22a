"""Ed25519 keys that sign receipts, and the public keys that check them.

A key file has one or more keys in PEM. The first one signs and must be a private key. The others
are earlier keys: their public halves suffice, and are published too, so that earlier receipts can
still be checked. Published keys are a JSON Web Key Set (RFC 8037).
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from services.receipts.canonical_json import canonical_json

N_ID_DIGITS = 16
"""Number of hexadecimal digits of the id of a key."""

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


def key_id(public: Ed25519PublicKey) -> str:
    """Returns the id of a key: the first digits of the SHA-256 of its 32 public bytes."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:N_ID_DIGITS]


def new_key() -> bytes:
    """Returns a new private key in PEM."""
    made = Ed25519PrivateKey.generate()
    return made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Public keys by their ids."""

    by_id: Mapping[str, Ed25519PublicKey]

    @classmethod
    def from_jwks(cls, document: object) -> Self:
        """Returns the keys of a JSON Web Key Set.

        Raises:
            ValueError: `document` is not a set of Ed25519 keys, or the id of a key is wrong.
        """
        found = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(found, list):
            raise ValueError('has no list "keys"')
        keys = {}
        for place, key in enumerate(found):
            try:
                public = Ed25519PublicKey.from_public_bytes(_from_base64url(key["x"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"keys.{place} is no Ed25519 key: {error}") from error
            if key.get("kid") != key_id(public):
                raise ValueError(f"keys.{place}.kid must be {key_id(public)}")
            keys[key_id(public)] = public
        return cls(keys)

    def to_jwks(self) -> dict[str, list[dict[str, str]]]:
        """Returns the keys as a JSON Web Key Set."""
        return {
            "keys": [
                {
                    "kty": "OKP",
                    "crv": "Ed25519",
                    "alg": "EdDSA",
                    "use": "sig",
                    "kid": name,
                    "x": _base64url(key.public_bytes_raw()),
                }
                for name, key in self.by_id.items()
            ]
        }

    def has_signed(self, receipt: Mapping[str, Any]) -> bool:
        """Returns whether one of these keys has made the signature of `receipt`. Returns False if
        the receipt has no signature, or names a key that is not one of these."""
        public = self.by_id.get(str(receipt.get("key_id")))
        if public is None:
            return False
        try:
            signature = base64.b64decode(str(receipt.get("signature")), validate=True)
            public.verify(signature, signed_part(receipt))
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The key that signs receipts, and all keys that are published."""

    private: Ed25519PrivateKey
    id: str
    """Id of the key that signs."""
    published: PublicKeys

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Returns the keys of a key file.

        Raises:
            ValueError: the content has no keys, the first key is not a private key, or a key is
                not an Ed25519 key in PEM without a password.
        """
        blocks = [(found[1], found[0]) for found in _BLOCK.finditer(content)]
        if not blocks:
            raise ValueError("has no key in PEM")
        keys = [_key(place, name, block) for place, (name, block) in enumerate(blocks, start=1)]
        first, *_ = keys
        if not isinstance(first, Ed25519PrivateKey):
            raise ValueError("the first key must be a private key, which signs")
        publics = [key if isinstance(key, Ed25519PublicKey) else key.public_key() for key in keys]
        published = PublicKeys({key_id(public): public for public in publics})
        return cls(first, key_id(publics[0]), published)

    def signed(self, receipt: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of `receipt`, signed: with the fields `key_id` and `signature`."""
        unsigned = {**receipt, "key_id": self.id}
        signature = self.private.sign(canonical_json(unsigned))
        return {**unsigned, "signature": base64.b64encode(signature).decode()}


def signed_part(receipt: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a receipt that are signed. Raises ValueError if the receipt has no
    canonical form."""
    return canonical_json({name: value for name, value in receipt.items() if name != "signature"})


def _key(place: int, name: bytes, block: bytes) -> Ed25519PrivateKey | Ed25519PublicKey:
    try:
        key: object
        if name == b"PUBLIC KEY":
            key = load_pem_public_key(block)
        else:
            key = load_pem_private_key(block, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"key {place} cannot be read: {error}") from error
    if not isinstance(key, Ed25519PrivateKey | Ed25519PublicKey):
        raise ValueError(f"key {place} is no Ed25519 key")
    return key


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _from_base64url(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("x must be a text")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
