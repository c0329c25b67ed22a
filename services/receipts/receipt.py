"""The form of a receipt, version 1. `docs/receipt.schema.json` is made from these types.

Numbers that doubles do not hold exactly, such as seeds, are texts. Digests are SHA-256 in
hexadecimal digits. Times are UTC.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from services.common.sampling import INT64_MAX, INT64_MIN, SamplingParams

VERSION = 1
"""Version of the form of receipts."""

TYPE = "orcinus.receipt"
"""Value of the field `type`, by which programs tell receipts from other signed objects."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Type of a SHA-256 in hexadecimal digits."""

Token = Annotated[int, Field(ge=0, lt=2**32)]
"""Type of the id of a token."""


class Record(BaseModel):
    """Base of the parts of a receipt. Undeclared fields and values of other types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AdapterRecord(Record):
    """The adapter (LoRA) that changed the model for an answer."""

    name: str
    """Name of the adapter as clients spell it."""
    digest: Digest
    """Digest of the adapter's configuration and of all bytes of its tensors."""


class ModelRecord(Record):
    """The model that made an answer."""

    name: str
    """Name of the model as clients spell it."""
    weights: Digest
    """Digest of all bytes of the weight files. It is made from lines that name each file and its
    digest."""
    configuration: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """First digits of a digest of the configuration that the workers have read, together with the
    length of the longest sequence."""
    max_model_len: Annotated[int, Field(ge=1)]
    """Number of tokens of the longest sequence that the workers serve. If the setting
    `max_model_len` changes this number, `configuration` changes, too."""
    tokenizer: Digest
    """Digest of the tokenizer, as a `tokenizer.json`."""
    template: Digest | None
    """Digest of the chat templates; null for a model without one."""
    adapter: AdapterRecord | None
    """The adapter that the answer was made with; null without one."""


class Arithmetic(Record):
    """Everything that determines how numbers are rounded. Two answers to a request are equal if
    their arithmetic is equal, and if that arithmetic keeps the promise of `docs/determinism.md`."""

    kernels: str
    """Implementation of the operations: `native-avx512_bf16` is the native library's build for an
    instruction set. `pytorch` and `triton` do not promise equal tokens."""
    dtype: str
    """Element type of the weights and of keys and values."""
    quantization: str
    """Quantization of matrices at load: `none`, `int8` or `int4`."""
    activations: str
    """Whether products with quantised matrices round their inputs: `rounded` or `exact`."""
    tp_size: str
    """Number of ranks that share each layer."""
    code: str
    """First digits of a digest of the workers' code."""
    torch: str
    """Version of PyTorch."""
    adapters: str = ""
    """First digits of a digest of all adapters of the workers. An adapter of a gated MLP changes
    how numbers are rounded, also in answers without the adapter. Left out if there are no
    adapters."""

    def __str__(self) -> str:
        named = zip(type(self).model_fields, self.model_dump().values(), strict=True)
        return ", ".join(f"{name} {value}" for name, value in named)


class TokenPrompt(Record):
    """A prompt, as its tokens."""

    tokens: list[Token]
    """Tokens of the prompt."""


class HiddenPrompt(Record):
    """A prompt that the receipt does not contain. Anyone who has the prompt can compute its digest
    and compare the two."""

    digest: Digest
    """Digest of the salt and the prompt's tokens, each token as 4 bytes, least significant first.
    """
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random bytes in hexadecimal digits. Because of them, equal prompts have different digests,
    and short prompts cannot be found in a table of digests."""
    n_tokens: Annotated[int, Field(ge=1)]
    """Number of tokens of the prompt."""

    def is_of(self, tokens: Sequence[int]) -> bool:
        """Returns whether this is the prompt with the tokens `tokens`: the number of tokens and the
        digest must be equal."""
        return len(tokens) == self.n_tokens and prompt_digest(self.salt, tokens) == self.digest


_JSON_TYPES: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    tuple[int, ...]: list[Token],
    tuple[tuple[int, ...], ...]: list[list[Token]],
    tuple[tuple[int, float], ...]: list[list[float]],
}
"""The type that a sampling option has in a receipt, for each type in `SamplingParams`."""

_FIELDS: dict[str, Any] = {
    field.name: (
        _JSON_TYPES[field.type],
        list(field.default) if isinstance(field.default, tuple) else field.default,
    )
    for field in dataclasses.fields(SamplingParams)
    if field.name != "seed"
}

SamplingRecord: Any = create_model("SamplingRecord", __base__=Record, **_FIELDS)
"""Type of the sampling options: all of `SamplingParams` but the seed."""


class OptionsRecord(Record):
    """The options of a request that determine its tokens, as the server applied them: with its
    default values, with all tokens that end the answer, and with formats and tools converted to a
    grammar."""

    max_tokens: Annotated[int, Field(ge=0)]
    """Largest number of tokens of the answer."""
    stop: list[str]
    """Texts that end the answer."""
    sampling: SamplingRecord
    """How tokens are chosen; the API's page explains each option."""


class Receipt(Record):
    """A signed record of how one answer was made."""

    type: Literal["orcinus.receipt"]
    """Always `orcinus.receipt`."""
    version: Literal[1]
    """Version of this form."""
    id: str
    """Id of the request, a hyphen, and the index of this answer among the answers to the request.
    Several receipts may have the same id, since a client that resumes a stream chooses the id of
    the request."""
    model: ModelRecord
    """The model that made the answer."""
    arithmetic: list[Arithmetic]
    """The arithmetic that made the tokens, in order. There are several entries only if the answer
    moved to workers of another build. There is none if this call computed no token."""
    prompt: TokenPrompt | HiddenPrompt
    """The prompt: its tokens, or a digest of them."""
    options: OptionsRecord
    """The options of the request."""
    seed: Annotated[str, Field(pattern=r"^-?[0-9]{1,19}$")]
    """Seed of this answer, as a decimal number."""
    tokens: list[Token]
    """Tokens of the answer, including the token that ended it."""
    n_given: Annotated[int, Field(ge=0)]
    """Number of tokens at the beginning of `tokens` that the client sent when it resumed a broken
    stream. The server did not compute these tokens in this call."""
    finish: Literal["stop", "stop_text", "length"]
    """Why the answer ended: by a token, by one of the texts in `stop`, or at the largest length."""
    time: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    """Time in UTC at which the receipt was made."""
    key_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Id of the key that signed the receipt."""
    signature: str
    """Ed25519 signature, in Base64, of the canonical JSON of the receipt without this field."""

    @property
    def sampling(self) -> SamplingParams:
        """The sampling options together with the seed. Raises ValueError if the seed does not fit
        into 64 bits."""
        seed = int(self.seed)
        if not INT64_MIN <= seed <= INT64_MAX:
            raise ValueError(f"seed: {seed} has more than 64 bits")
        given = self.options.sampling.model_dump()
        given["logit_bias"] = [(int(token), bias) for token, bias in given["logit_bias"]]
        frozen = {name: _frozen(value) for name, value in given.items()}
        return SamplingParams(**frozen, seed=seed)


def sampling_record(sampling: SamplingParams) -> dict[str, object]:
    """Returns the fields of a receipt's `sampling`: all sampling options except the seed."""
    return {name: getattr(sampling, name) for name in _FIELDS}


def prompt_digest(salt: str, tokens: Sequence[int]) -> str:
    """Returns the SHA-256 of `salt` and the tokens of a prompt, in hexadecimal digits. `salt` is in
    hexadecimal digits, too."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.sha256(bytes.fromhex(salt) + packed).hexdigest()


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
