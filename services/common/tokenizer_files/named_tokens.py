"""The tokens that files beside a vocabulary name: added tokens, and tokens with a role.

`added_tokens.json` has numbers by text, `tokenizer_config.json` has `added_tokens_decoder` with
texts by number, and roles such as `eos_token`. `special_tokens_map.json` has roles too. As in
`transformers`, `added_tokens.json` and `special_tokens_map.json` count only if
`tokenizer_config.json` does not list the added tokens; then the map comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common import bounded_file
from services.common.tokenizer_parts import Json, added_token

MAX_CONFIG_BYTES = 16 << 20
"""Largest size of one of the files in bytes: some list a hundred thousand added tokens."""

_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens that files beside a vocabulary name."""

    config: Mapping[str, Any]
    """The content of `tokenizer_config.json`, and of `special_tokens_map.json` if it counts."""
    roles: Mapping[str, str]
    """Texts of tokens by their roles, such as `bos_token`."""
    special: frozenset[str]
    """Texts of tokens that are special."""
    added: Mapping[str, int]
    """Numbers of added tokens by their texts."""
    forms: Mapping[str, Mapping[str, Any]]
    """How an added token is found in a text (`lstrip` and others), by its text."""

    @classmethod
    def beside(cls, vocabulary: Path, roles: Mapping[str, str]) -> Self:
        """Reads the files in the directory of `vocabulary`. `roles` are those of the model's class,
        which the files may change.

        Raises:
            OSError: a file cannot be read.
            ValueError, TypeError, LookupError: a file is broken.
        """
        config = _json(vocabulary.parent / "tokenizer_config.json")
        added: dict[str, int] = {}
        if "added_tokens_decoder" not in config:
            config |= _json(vocabulary.parent / "special_tokens_map.json")
            older = _json(vocabulary.parent / "added_tokens.json")
            added |= {str(text): int(token_id) for text, token_id in older.items()}
        named = {**roles, **_roles(config)}
        special = {_text(token) for key in _LISTS for token in _listed(config.get(key))}
        forms: dict[str, Mapping[str, Any]] = {}
        for token_id, token in config.get("added_tokens_decoder", {}).items():
            added[token["content"]] = int(token_id)
            forms[token["content"]] = token
            if token.get("special"):
                special.add(token["content"])
        return cls(config, named, frozenset((*named.values(), *special)), added, forms)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a switch of the configuration; null means the default."""
        found = self.config.get(name)
        return default if found is None else bool(found)

    def with_role(self, role: str, vocab: Mapping[str, int]) -> tuple[str, int] | None:
        """Returns text and number of the token with a role, if the vocabulary has one."""
        text = self.roles.get(role)
        if text is None:
            return None
        token_id = self.added.get(text, vocab.get(text))
        return None if token_id is None else (text, token_id)

    def tokens(self, vocab: Mapping[str, int]) -> Iterator[Json]:
        """Yields all tokens that are found in a text before the rest is tokenized: added ones, and
        special ones of the vocabulary.

        Raises:
            ValueError: an added token has the number of another token.
        """
        by_id = {token_id: text for text, token_id in vocab.items()}
        for text, token_id in self.added.items():
            if token_id < 0 or by_id.setdefault(token_id, text) != text:
                raise ValueError(f"added token {text[:80]!r} has the number of another token")
        known = {**vocab, **self.added}
        for text in dict.fromkeys((*self.added, *sorted(self.special))):
            if text in known and text:
                form = self.forms.get(text, {})
                yield {
                    **added_token(text, known[text], special=text in self.special),
                    **{
                        key: bool(form[key])
                        for key in ("single_word", "lstrip", "rstrip", "normalized")
                        if key in form
                    },
                }


def _json(path: Path) -> Json:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_CONFIG_BYTES)


def _roles(contents: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _text(token)
        for name, token in contents.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }


def _listed(tokens: object) -> list[Any]:
    if isinstance(tokens, dict):
        return list(tokens.values())
    return tokens if isinstance(tokens, list) else []


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
