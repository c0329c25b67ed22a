"""Reads the tokens that are named in files of the same directory as a vocabulary file: added
tokens, and tokens with a role such as `eos_token`. `services.common.tokenizer_config` has the rules
for these files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common.tokenizer_config import TokenizerConfig
from services.common.tokenizer_parts import Json, added_token


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Tokens that are named in files of the same directory as a vocabulary file: added tokens,
    special tokens, and tokens with a role."""

    config: Mapping[str, Any]
    """The content of `tokenizer_config.json`, including `special_tokens_map.json` if that file is
    used."""
    roles: Mapping[str, str]
    """Texts of tokens by their roles, such as `bos_token`."""
    special: frozenset[str]
    """Texts of the special tokens."""
    added: Mapping[str, int]
    """Ids of the added tokens by their texts."""
    forms: Mapping[str, Mapping[str, Any]]
    """Properties of each added token, keyed by the token's text. They say how the token is found in
    a text, for example `lstrip`."""

    @classmethod
    def beside(cls, vocabulary: Path, roles: Mapping[str, str]) -> Self:
        """Reads the files in the directory of `vocabulary`, the path of a vocabulary file. `roles`
        has the default texts of tokens by their roles; the files may replace them.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is broken.
        """
        found = TokenizerConfig.of_directory(vocabulary.parent)
        named = {**roles, **found.special_tokens}
        forms = {token["content"]: token for token in found.listed.values()}
        return cls(
            config=found.keys,
            roles=named,
            special=frozenset((
                *named.values(),
                *found.further_special_tokens,
                *(text for text, form in forms.items() if form["special"]),
            )),
            added={token["content"]: number for number, token in found.listed.items()},
            forms=forms,
        )  # fmt: skip

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns the boolean that `tokenizer_config.json` has under `name`. Returns `default` if
        the value is null or missing."""
        found = self.config.get(name)
        return default if found is None else bool(found)

    def with_role(self, role: str, vocab: Mapping[str, int]) -> tuple[str, int] | None:
        """Returns the text and the id of the token with the role `role`, such as `bos_token`.
        Returns None if no token has this role, or the token has no id."""
        text = self.roles.get(role)
        if text is None:
            return None
        token_id = self.added.get(text, vocab.get(text))
        return None if token_id is None else (text, token_id)

    def tokens(self, vocab: Mapping[str, int]) -> Iterator[Json]:
        """Yields all tokens that the tokenizer looks for in a text before it divides the rest into
        words: added tokens, and special tokens of the vocabulary `vocab`.

        Raises:
            ValueError: an added token has the id of another token.
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
