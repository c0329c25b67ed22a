"""A checkpoint for tests of formats: a tokenizer with special tokens, and grammars for it."""

from pathlib import Path

from services.frontend.text.tokenizer import Tokenizer
from services.grammar.grammars import Grammars
from tests.frontend import checkpoints
from tests.grammar.compiled import matcher_of


class Checkpoint:
    """A tokenizer with some special tokens, and grammars for it."""

    def __init__(self, directory: Path, *special: str) -> None:
        tokenizer = checkpoints.byte_level()
        tokenizer.add_special_tokens([*special])
        tokenizer.save(str(directory / "tokenizer.json"))
        self.eos: int = tokenizer.get_vocab()[checkpoints.EOS]
        self.library = tokenizer
        self.tokenizer = Tokenizer.from_directory(directory)
        self.grammars = Grammars(
            directory / "tokenizer.json",
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_ids=[self.eos],
        )

    def follows(self, grammar: str, text: str) -> bool:
        """Returns whether an answer may be this text."""
        matcher = matcher_of(self.grammars, grammar)
        for token in [*self.library.encode(text, add_special_tokens=False).ids, self.eos]:
            if not int.from_bytes(matcher.mask(), "little") >> token & 1:
                return False
            matcher.take(token)
        return True
