"""Reads what `tokenizer_config.json`, and small files in the same directory, say about tokens.

`tokenizer.json` has the vocabulary. Some checkpoints name a few further tokens, or which tokens are
special, only in `tokenizer_config.json`. The rules are the rules of `transformers` 5:

- `added_tokens_decoder` lists tokens by id. If this key exists, `special_tokens_map.json` and
  `added_tokens.json` are ignored.
- Otherwise `special_tokens_map.json` replaces the keys of `tokenizer_config.json`, and
  `added_tokens.json` lists tokens by text.
- The values of `bos_token`, `eos_token` and other keys with such names, and of an object
  `extra_special_tokens`, are special tokens. Texts in a list `extra_special_tokens` or
  `additional_special_tokens` are special tokens if the tokenizer does not have them yet.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common import bounded_file

MAX_CONFIG_BYTES = 16 << 20
"""Largest size of a `tokenizer_config.json` in bytes. Some of these files list a hundred thousand
added tokens."""

CONFIG, MAP, ADDED, TOKENIZER = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json",
)  # fmt: skip

_LISTS = ("extra_special_tokens", "additional_special_tokens")
_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokens that are named in `tokenizer_config.json` and in small files of the same
    directory."""

    keys: Mapping[str, Any]
    """The keys and values of `tokenizer_config.json`. The keys of `special_tokens_map.json` are
    included if that file is used."""

    source: Mapping[str, str]
    """The name of the file from which each key was read."""

    listed: Mapping[int, Json]
    """The added tokens by id, in the form of `tokenizer.json`."""

    @classmethod
    def of_directory(cls, directory: Path) -> Self:
        """Reads the files in a checkpoint's directory. Any of the files may be missing.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is broken.
        """
        keys = _read(directory / CONFIG)
        source = dict.fromkeys(keys, CONFIG)
        if keys.get("added_tokens_decoder") is not None:
            return cls(keys, source, dict(_listed(keys["added_tokens_decoder"])))
        further = _read(directory / MAP)
        merged = {**keys, **further}
        added = _read(directory / ADDED)
        named = {*_named(merged).values()}
        listed = {
            _number(number): _token(text, {"special": text in named, "normalized": False})
            for text, number in added.items()
        }
        if len(listed) < len(added):
            raise ValueError(f"{ADDED} gives two tokens the number of one")
        return cls(merged, {**source, **dict.fromkeys(further, MAP)}, listed)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by their names, such as `bos_token`."""
        return _named(self.keys)

    @property
    def further_special_tokens(self) -> list[str]:
        """The texts of special tokens that have no name."""
        value = next((self.keys[key] for key in _LISTS if self.keys.get(key)), None)
        return [*map(_text, value)] if isinstance(value, list) else []


def completed_tokenizer(content: str, directory: Path) -> str:
    """Returns the content of a `tokenizer.json`, completed with the tokens that other files in
    `directory` name.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is broken, or gives a token an id that is not free.
    """
    config = TokenizerConfig.of_directory(directory)
    if not config.listed and not config.special_tokens and not config.further_special_tokens:
        return content
    given = json_object(content)
    whole = complete(given, config)
    return content if whole is given else json.dumps(whole, ensure_ascii=False)


def json_object(content: str) -> Json:
    """Returns the JSON object in the content of a `tokenizer.json`. Raises ValueError if the
    content is not a JSON object."""
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{TOKENIZER} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{TOKENIZER} holds no JSON object")
    return given


def complete(tokenizer: Json, config: TokenizerConfig) -> Json:
    """Returns the content of a `tokenizer.json`, completed with the tokens of `config`. Returns
    `tokenizer` itself if it already has all of them.

    Raises:
        ValueError: a listed token has an id that is not free, or the tokenizer has no vocabulary.
    """
    numbers = Numbers(tokenizer)
    changed: dict[int, Json] = {}
    for number, token in sorted(config.listed.items()):
        text = token["content"]
        if numbers.find(text) is None and numbers.of(text) != number:
            raise ValueError(
                f"{text[:40]!r}, which {TOKENIZER} lacks, cannot be the token {number}: "
                f"the next free number is {numbers.of(text)}"
            )
        number = numbers.of(text)
        if numbers.add(text) or (token["special"] and not numbers.is_special(number)):
            changed[number] = {**token, "id": number}
    for text in config.special_tokens.values():
        number = numbers.of(text)
        if (numbers.add(text) or not numbers.is_special(number)) and number not in changed:
            changed[number] = _token(text, {"special": True, "normalized": False}) | {"id": number}
        elif number in changed:
            changed[number]["special"] = True
    for text in config.further_special_tokens:
        number = numbers.of(text)
        if numbers.add(text):
            changed[number] = _token(text, {"special": True, "normalized": False}) | {"id": number}
    if not changed:
        return tokenizer
    kept = [
        {**token, "special": True} if changed.pop(token["id"], None) else token
        for token in numbers.added
    ]
    return {**tokenizer, "added_tokens": kept + sorted(changed.values(), key=lambda t: t["id"])}


class Numbers:
    """Finds the ids of a tokenizer's tokens, and the ids that new tokens get."""

    def __init__(self, tokenizer: Json) -> None:
        self.added = _added_tokens(tokenizer)
        """Tokens that are not in the vocabulary of the tokenizer's model, or are found in texts
        before the model runs."""
        self._vocab = _vocabulary(tokenizer)
        self._added = {token["content"]: token["id"] for token in self.added}
        self._next = max((len(self._vocab), *(number + 1 for number in self._added.values())))
        self._special = {token["id"] for token in self.added if token.get("special")}

    def find(self, text: str) -> int | None:
        """Returns the id of the token `text`, or None if the tokenizer does not have this token."""
        found = self._added.get(text, self._vocab.get(text))
        return None if found is None else _number(found, TOKENIZER)

    def of(self, text: str) -> int:
        """Returns the id of the token `text`. If the tokenizer does not have this token, returns
        the next free id."""
        found = self.find(text)
        return self._next if found is None else found

    def add(self, text: str) -> bool:
        """Adds the token `text` to the tokenizer's added tokens. Returns False if it was already
        one of them."""
        is_new = text not in self._added
        self._added[text] = number = self.of(text)
        self._next = max(self._next, number + 1)
        return is_new

    def is_special(self, number: int) -> bool:
        """Returns whether `tokenizer.json` marks the token with the id `number` as special."""
        return number in self._special


def _added_tokens(tokenizer: Json) -> list[Json]:
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise ValueError(f"{TOKENIZER}: added_tokens is no list")
    for token in added:
        if not (isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise ValueError(f"{TOKENIZER}: {repr(token)[:80]} in added_tokens is no token")
        _number(token.get("id"), TOKENIZER)
    return added


def _vocabulary(tokenizer: Json) -> dict[str, int]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of pieces with their scores
        pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocab)
        vocab = {piece: number for number, piece in enumerate(pieces) if isinstance(piece, str)}
    if not isinstance(vocab, dict):
        raise ValueError(f"{TOKENIZER} has no vocabulary")
    return vocab


def _read(path: Path) -> Json:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_CONFIG_BYTES)


def _named(keys: Mapping[str, Any]) -> dict[str, str]:
    more = keys.get("extra_special_tokens")
    named = {**keys, **(more if isinstance(more, dict) else {})}
    return {
        name: _text(token)
        for name, token in named.items()
        if name.endswith("_token") and isinstance(token, str | dict) and _text(token)
    }


def _listed(decoder: Any) -> Iterator[tuple[int, Json]]:
    if not isinstance(decoder, dict):
        raise ValueError(f"{CONFIG}: added_tokens_decoder is no object")
    for number, token in decoder.items():
        if not isinstance(token, dict):
            raise ValueError(f"{CONFIG}: added_tokens_decoder.{str(number)[:20]} is no object")
        yield _number(number), _token(_text(token), token)


def _token(text: str, properties: Mapping[str, Any]) -> Json:
    """Returns a token in the form of `tokenizer.json`, without its id."""
    is_special = bool(properties.get("special"))
    defaults = {name: name == "normalized" and not is_special for name in _PROPERTIES}
    given = {name: bool(properties[name]) for name in _PROPERTIES if name in properties}
    return {"content": text, **defaults, **given}


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{CONFIG}: the token {repr(token)[:80]} has no text")
    return text


def _number(value: Any, file: str = CONFIG) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: {repr(value)[:40]} is no number of a token") from error
    if not 0 <= number < 2**31:
        raise ValueError(f"{file}: {repr(value)[:40]} is no number of a token")
    return number
