"""The prompt that a model which scores pairs gets for a query and a document.

A checkpoint with a classification head gets both texts as a pair, as `sentence-transformers` gives
them. All others get the prompt of Qwen3-Reranker. The setting `pair_template` replaces both.
"""

import re

from services.frontend.request.text_pair import TextPair
from services.frontend.request.text_parts import TextParts

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of Qwen3-Reranker where the client gives none."""

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, from its model card."""

_PLACE = re.compile(r"\{(instruction|query|document)\}")
"""Pattern of a place. A template that is split at its places has their names between the texts."""


class PairFormat:
    """Makes the prompts of one model."""

    def __init__(self, template: str = "", *, has_classifier: bool = False) -> None:
        """`template` has `{query}`, `{document}` and perhaps `{instruction}`. When it is empty,
        `has_classifier` says whether the checkpoint has a classification head."""
        template = template or ("" if has_classifier else QWEN3_RERANKER)
        self._pieces = _PLACE.split(template) if template else ()

    @property
    def is_plain(self) -> bool:
        """Whether the prompt of a pair is both texts, and no template around them."""
        return not self._pieces

    def prompt(
        self, query: str, document: str, instruction: str | None = None
    ) -> TextPair | TextParts:
        """Returns the prompt for a query and a document. The prompts of one query share its
        memory."""
        if not self._pieces:
            return TextPair(query, document)
        given = {
            "instruction": DEFAULT_INSTRUCTION if instruction is None else instruction,
            "query": query,
            "document": document,
        }
        return TextParts(
            tuple(given[one] if index % 2 else one for index, one in enumerate(self._pieces))
        )
