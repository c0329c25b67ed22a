"""Reads what a checkpoint's files say about its vectors (embeddings or scores): how texts are
prepared, and to which lengths embeddings may be cut.

The prompts that go before texts are in `config_sentence_transformers.json`. Whether texts are
converted to lower case is in `sentence_bert_config.json`. The lengths to which vectors may be cut
(Matryoshka) are in `config.json`. The workers report how hidden states become vectors
(`services.common.pooling`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from services.common import bounded_file, errors

PROMPTS_FILE = "config_sentence_transformers.json"
TEXTS_FILE = "sentence_bert_config.json"

MAX_FILE_BYTES = 4 << 20
"""Largest size of each file in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorDefaults:
    """The settings that a checkpoint has for its vectors (embeddings or scores): the prompts that
    go before texts, whether texts are converted to lower case, and the lengths to which embeddings
    may be cut."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go before the client's text, by their names."""
    default_prompt: str = ""
    """Name of the prompt that is used if the client names none; empty if none is."""
    lowers: bool = False
    """Whether texts are converted to lower case before they are tokenized, as for BGE."""
    lengths: tuple[int, ...] = ()
    """Lengths to which vectors may be cut."""
    has_any_length: bool = False
    """Whether vectors may be cut to any length."""
    has_classifier: bool = False
    """Whether the checkpoint has a classification head."""

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads the files in a checkpoint's directory, as far as they exist.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not valid. The message names the file and what is wrong.
        """
        texts, config = _read(directory / PROMPTS_FILE), _read(directory / "config.json")
        lowers = _read(directory / TEXTS_FILE).get("do_lower_case", False)
        if lowers not in (True, False, None):
            raise ValueError(f"{directory / TEXTS_FILE}: do_lower_case is neither true nor false")
        prompts = texts.get("prompts") or {}
        default = texts.get("default_prompt_name") or ""
        path = directory / PROMPTS_FILE
        if not isinstance(prompts, dict) or not _are(str, prompts.values()):
            raise ValueError(f"{path}: prompts are not texts by their names")
        if default and default not in prompts:
            raise ValueError(f"{path}: default_prompt_name names none of the prompts")
        lengths = config.get("matryoshka_dimensions") or []
        if not isinstance(lengths, list) or not _are(int, lengths) or min(lengths, default=1) < 1:
            raise ValueError(
                f"{directory / 'config.json'}: matryoshka_dimensions are no positive numbers"
            )
        return cls(
            prompts=prompts,
            default_prompt=default,
            lowers=bool(lowers),
            lengths=tuple(lengths),
            has_classifier=_has_classifier(config.get("architectures")),
            has_any_length=config.get("is_matryoshka") is True and not lengths,
        )

    def text_before(self, name: str | None) -> str:
        """Returns the text of the prompt `name`, which goes before the client's text. If `name` is
        None, returns the text of the default prompt, which is empty if there is none.

        Raises:
            InvalidRequest: the checkpoint has no prompt of this name.
        """
        if name is None:
            return self.prompts.get(self.default_prompt, "")
        if name not in self.prompts:
            known = errors.listed(sorted(self.prompts)) if self.prompts else "none"
            raise errors.InvalidRequest(
                "prompt_name", f"{errors.shortened(name)!r} is not known; the model has {known}"
            )
        return self.prompts[name]

    def lowered(self, text: str) -> str:
        """Returns a text in lower case if the checkpoint demands lower case, else as it is."""
        return text.lower() if self.lowers else text

    def check_length(self, n_values: int, *, whole: int) -> None:
        """Raises InvalidRequest if vectors of `whole` elements may not be cut to `n_values`
        elements."""
        if n_values == whole or (n_values in self.lengths and n_values < whole):
            return
        if self.has_any_length and 0 < n_values < whole:
            return
        may = f"{whole}"
        if self.has_any_length:
            may = f"from 1 to {whole}"
        elif self.lengths:
            may = f"one of {sorted({*self.lengths, whole})}"
        raise errors.InvalidRequest("dimensions", f"must be {may}, as the model declares")


def _has_classifier(architectures: Any) -> bool:
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return str(first).endswith("ForSequenceClassification")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_FILE_BYTES)


def _are(kind: type, values: Any) -> bool:
    return all(type(value) is kind for value in values)
