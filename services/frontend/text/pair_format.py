"""Makes the prompt for a query and a document, for models that score pairs of texts.

By default, a checkpoint with a classification head gets the two texts as a pair, as
`sentence-transformers` gives them, and any other checkpoint gets the prompt of Qwen3-Reranker. If
the setting `pair_template` is given, its prompt is used for either kind.
"""

import re

from services.frontend.request.text_pair import TextPair
from services.frontend.request.text_parts import TextParts

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction in the prompt if the client gives none. It is the default instruction of
Qwen3-Reranker."""

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, from its model card."""

_PLACE = re.compile(r"\{(instruction|query|document)\}")
"""Matches a placeholder of a template. `split` with this pattern returns the texts of a template,
with the names of its placeholders between them."""


class PairFormat:
    """Makes the prompts in which one model compares a query and a document."""

    def __init__(self, template: str = "", *, has_classifier: bool = False) -> None:
        """`template` is the prompt, with the placeholders `{query}`, `{document}` and perhaps
        `{instruction}`. If `template` is empty, the prompt depends on `has_classifier`: whether the
        checkpoint has a classification head."""
        template = template or ("" if has_classifier else QWEN3_RERANKER)
        self._pieces = _PLACE.split(template) if template else ()

    @property
    def is_plain(self) -> bool:
        """Whether the prompt consists only of the two texts, without a template around them."""
        return not self._pieces

    def prompt(
        self, query: str, document: str, instruction: str | None = None
    ) -> TextPair | TextParts:
        """Returns the prompt for a query and a document. All prompts with the same query share the
        memory of the query."""
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
