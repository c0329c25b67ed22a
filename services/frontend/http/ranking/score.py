"""POST /v1/score, in the form of vLLM: the body, the answer and the handler."""

from typing import Annotated, Literal

from typing_extensions import TypedDict

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.scores import scores_of
from services.frontend.generation.vector_requests import check_not_empty, check_number
from services.frontend.http.bodies.ranges import NOT_EMPTY
from services.frontend.http.protocol.answer_object import answer_object
from services.frontend.http.protocol.api import Api
from services.frontend.http.protocol.prompt_usage import PromptUsage, usage_of
from services.frontend.http.ranking.pairs_body import PairsBody
from services.frontend.request.texts_field import TextsField

Texts = str | Annotated[list[str], NOT_EMPTY]


class ScoreBody(PairsBody):
    """The body of POST /v1/score. There are as many pairs as the longer list has texts. The other
    field has a list of equal length, or one text for all pairs."""

    text_1: Texts
    """The first text or texts of pairs, such as queries."""
    text_2: Texts
    """The second text or texts of pairs, such as documents."""

    @property
    def field(self) -> TextsField:
        """Name of the field with the longer list, which has one text for each pair."""
        fields = (TextsField("text_2", isinstance(self.text_2, str)), TextsField("text_1"))
        return fields[len(_listed(self.text_1)) > len(_listed(self.text_2))]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score.

        Raises:
            InvalidRequest: a list is too long, a list or a text is empty, or the lists have
            different lengths.
        """
        first, second = _listed(self.text_1), _listed(self.text_2)
        for name, given in (("text_1", self.text_1), ("text_2", self.text_2)):
            field, texts = TextsField(name, isinstance(given, str)), _listed(given)
            check_number(name, len(texts))
            if not texts:
                raise errors.InvalidRequest(name, "must not be empty")
            check_not_empty(field, texts)
        if len(first) != len(second) and 1 not in (len(first), len(second)):
            raise errors.InvalidRequest(
                "text_2", f"has {len(second)} texts where text_1 has {len(first)}"
            )
        n_pairs = max(len(first), len(second))
        first, second = (texts * n_pairs if len(texts) == 1 else texts for texts in (first, second))
        return list(zip(first, second, strict=True))


@answer_object
class Score(TypedDict):
    """The score of one pair."""

    object: Literal["score"]
    """Always `score`."""
    index: int
    """Index of the pair."""
    score: float
    """The score: from 0 to 1, or a logit if the checkpoint's configuration says that scores are
    logits."""


@answer_object
class Scores(TypedDict):
    """The scores of all pairs."""

    object: Literal["list"]
    """Always `list`."""
    id: str
    """Id of the request."""
    data: list[Score]
    """One entry for each pair, in their order."""
    model: str
    """Name of the model."""
    usage: PromptUsage
    """Numbers of tokens."""


async def create_scores(api: Api, body: ScoreBody, account: Account) -> Scores:
    """Returns the scores of pairs of texts."""
    pairs = api.models.select(body.model or "", account).service.pairs
    request = body.to_request(body.pairs, pairs, field=body.field)
    async with api.models.prepare(request, account) as generation:
        scores = await scores_of(generation)
    return {
        "object": "list",
        "id": generation.request_id,
        "data": [
            {"object": "score", "index": index, "score": score}
            for index, score in enumerate(scores)
        ],
        "model": generation.model,
        "usage": usage_of(generation),
    }


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
