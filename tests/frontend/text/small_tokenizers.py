"""A tokenizer of each kind that spells text in its own way, and texts that are hard to spell."""

import pytest
from hypothesis import strategies as st

from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

BYTE_LEVEL = Tokenizer(checkpoints.byte_level())
SENTENCEPIECE = Tokenizer(checkpoints.sentencepiece_like())
METASPACE = Tokenizer(checkpoints.metaspace())

all_tokenizers = pytest.mark.parametrize(
    "tokenizer",
    [BYTE_LEVEL, SENTENCEPIECE, METASPACE],
    ids=["byte-level", "sentencepiece", "metaspace"],
)
odd_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("héllo 世🐋 ▁\ufffd\n")
