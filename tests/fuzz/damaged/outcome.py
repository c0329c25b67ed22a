"""The result of reading a checkpoint's files: a refusal, or an answer to one prompt and one
text."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.cannot_start import CannotStart
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.tokenizer import Tokenizer
from services.worker.models.checkpoint import open_checkpoint
from tests.worker.pipeline import Pipeline, Span

PROMPT = [5, 9, 100, 3, 42, 198, 7, 60, 61, 62]
TEXT = "the cat</s> é\n\n12"

_FILE = re.compile(r"\.(json|jinja|safetensors|gguf|bin|model|txt)\b")


@dataclass(frozen=True)
class Refusal:
    """Why a checkpoint is not served."""

    reason: str

    def __str__(self) -> str:
        return f"refused: {self.reason}"

    @property
    def is_about_values(self) -> bool:
        """Whether only reading weights, or only the prompt, shows the reason."""
        of_values = ("not finite", "for the prompt", "has zero points")
        return any(text in self.reason for text in of_values)

    @property
    def names_a_file(self) -> bool:
        """Whether a reader learns which file to look at."""
        return _FILE.search(self.reason) is not None


@dataclass(frozen=True)
class Answer:
    """What a checkpoint makes of `PROMPT`, its logits, and of `TEXT`, its tokens and their
    text."""

    logits: Tensor
    tokens: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"answers {self.logits[0, :4].tolist()} {self.tokens} {self.text!r}"


def model_in(directory: Path) -> Path:
    """Returns the path that names the model: the first GGUF file if there is one, or the
    directory."""
    return min(directory.glob("*.gguf"), default=directory)


def answer(model: Path) -> Answer | Refusal:
    """Reads a checkpoint as workers and frontends do. An error that they do not expect is
    raised."""
    model = model_in(model)
    try:
        context = open_checkpoint(model).config.max_position_embeddings
        if context < len(PROMPT):
            return Refusal(f"config.json: {context} tokens are too few for the prompt")
        pipeline = Pipeline(model, dtype="float32")
        pipeline.admit(0, len(PROMPT))
        _, logits = pipeline.run([Span(0, PROMPT)])
    except CannotStart as error:
        return Refusal(str(error))
    try:
        tokenizer = Tokenizer.from_model(model)
        ChatTemplate.from_model(model)
    except (OSError, ValueError) as error:
        return Refusal(str(error))
    tokens = tokenizer.to_tokens(TEXT)
    return Answer(logits, tokens, tokenizer.to_text(tokens))


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
