"""The tokens that files beside a vocabulary name: added tokens, and tokens with a role such as
`eos_token`. `services.common.tokenizer_config` reads these files, and has the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common.tokenizer_config import TokenizerConfig
from services.common.tokenizer_parts import Json, added_token


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
