"""The handler of GET /.well-known/orcinus-keys.json, which needs no key."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.errors import json_response

PATH = "/.well-known/orcinus-keys.json"


@answer_object
class ReceiptKey(TypedDict):
    """A public key that checks receipts, as a JSON Web Key."""

    kty: str
    """Always `OKP`."""
    crv: str
    """Always `Ed25519`."""
    alg: str
    """Always `EdDSA`."""
    use: str
    """Always `sig`."""
    kid: str
    """Id of the key, which receipts name in `key_id`."""
    x: str
    """The 32 bytes of the key in Base64 for URLs."""


@answer_object
class ReceiptKeys(TypedDict):
    """Public keys that check receipts, as a JSON Web Key Set."""

    keys: list[ReceiptKey]
    """The keys; the first one signs."""


async def receipt_keys(api: Api, request: Request) -> Response:
    """Returns the public keys of this server."""
    if api.receipt_keys is None:
        raise HTTPException(404)
    return json_response(api.receipt_keys.latest.published.to_jwks())
