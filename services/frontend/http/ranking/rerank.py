"""POST /v1/rerank, in the form that Jina, Cohere and vLLM share: the body, the answer and the
handler."""

from typing import Annotated, NotRequired

from typing_extensions import TypedDict

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.scores import scores_of
from services.frontend.generation.vector_requests import (
    CUTS_TEMPLATE,
    check_not_empty,
    check_number,
)
from services.frontend.http.bodies.accepted_values import only
from services.frontend.http.bodies.object_kinds import ExactModel
from services.frontend.http.bodies.ranges import NOT_EMPTY, Within
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.prompt_usage import PromptUsage, usage_of
from services.frontend.http.ranking.pairs_body import PairsBody
from services.frontend.request.texts_field import TextsField
from services.frontend.request.truncation import WHOLE

DOCUMENTS = TextsField("documents")


class TextDocument(ExactModel):
    """A document that is given as an object, and not as a text."""

    text: str
    """Text of the document."""


class RerankBody(PairsBody):
    """The body of POST /v1/rerank."""

    query: str
    """Query for which the documents are ranked."""
    documents: Annotated[list[str | TextDocument], NOT_EMPTY]
    """The documents, as texts or as objects with a `text`."""
    top_n: Annotated[int | None, Within({"minimum": 1})] = None
    """Number of documents to return; by default all."""
    max_tokens_per_doc: Annotated[int | None, only()] = None
    """Not supported: must be null. A document that is too long is refused."""
    truncation: bool | None = None
    """Whether pairs that are too long for the model are cut off, as with `truncate_prompt_tokens`
    -1. The two fields must not be used together."""
    return_documents: bool | None = None
    """Whether the answer also has the texts of the documents. The default is true."""

    @property
    def cut_to(self) -> int | None:
        """Number of tokens to which longer pairs are cut off, from `truncation` or from
        `truncate_prompt_tokens`. None if pairs are not cut off."""
        return WHOLE if self.truncation else self.truncate_prompt_tokens

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def check(self) -> None:
        """Raises InvalidRequest if the query or a document is empty, if there are no documents or
        too many, if `top_n` is less than 1, or if both `truncation` and `truncate_prompt_tokens`
        are set."""
        check_number("documents", len(self.documents))
        for field, value in (("query", self.query), ("documents", self.documents)):
            if not value:
                raise errors.InvalidRequest(field, "must not be empty")
        check_not_empty(DOCUMENTS, self.texts)
        if self.truncation and self.truncate_prompt_tokens is not None:
            raise errors.InvalidRequest("truncation", "not with truncate_prompt_tokens")
        if self.top_n is not None and self.top_n < 1:
            raise errors.InvalidRequest("top_n", "must be at least 1")


@answer_object
class RankedText(TypedDict):
    """The text of a document."""

    text: str
    """Text of the document."""


@answer_object
class RankedDocument(TypedDict):
    """A document and its score."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    """The score: from 0 to 1, or a logit if the checkpoint's configuration says that scores are
    logits."""
    document: NotRequired[RankedText]
    """The document. Left out if the request says `return_documents: false`."""


@answer_object
class Ranking(TypedDict):
    """The documents in the order of their scores."""

    id: str
    """Id of the request."""
    model: str
    """Name of the model."""
    results: list[RankedDocument]
    """The documents, highest score first."""
    usage: PromptUsage
    """Numbers of tokens."""


async def rerank(api: Api, body: RerankBody, account: Account) -> Ranking:
    """Scores the documents for the query, and returns them, highest score first."""
    body.check()
    texts = body.texts
    pairs = api.models.select(body.model or "", account).service.pairs
    if body.truncation and not pairs.is_plain:
        raise errors.InvalidRequest("truncation", CUTS_TEMPLATE)
    request = body.to_request([(body.query, text) for text in texts], pairs, field=DOCUMENTS)
    async with api.models.prepare(request, account) as generation:
        scores = await scores_of(generation)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results: list[RankedDocument] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return {
        "id": generation.request_id,
        "model": generation.model,
        "results": results,
        "usage": usage_of(generation),
    }
