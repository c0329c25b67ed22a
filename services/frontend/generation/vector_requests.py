"""Makes the requests for embeddings and for the scores of pairs of texts, in the form that all
protocols share. The result of either request is one vector for each prompt."""

from collections.abc import Sequence

from services.common import errors
from services.common.priority import DEFAULT_PRIORITY
from services.frontend.request.generation_request import (
    MAX_ANSWERS,
    GenerationOptions,
    GenerationRequest,
    Prompt,
)
from services.frontend.request.text_parts import TextParts
from services.frontend.request.texts_field import TextsField
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.pair_format import PairFormat

CUTS_TEMPLATE = "not with a model whose prompt goes on behind the document"
"""Error text for a request to cut off long prompts, if a template makes the prompts."""


def vector_options(
    *,
    wants_score: bool = False,
    add_special_tokens: bool | None = None,
    priority: int | None = None,
    cache_salt: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> GenerationOptions:
    """Returns the options of a request for vectors. If `wants_score`, each vector has one number,
    the score of a pair of texts. For the other options, None means the default."""
    return GenerationOptions(
        wants_vector=True,
        wants_score=wants_score,
        add_special_tokens=add_special_tokens,
        priority=DEFAULT_PRIORITY if priority is None else priority,
        cache_salt=cache_salt or "",
        truncate_prompt_tokens=truncate_prompt_tokens,
    )


def embedding_request(
    inputs: Sequence[Prompt],
    options: GenerationOptions,
    *,
    defaults: VectorDefaults,
    prompt_name: str | None,
    model: str,
    field: TextsField,
) -> GenerationRequest:
    """Returns the request for the embeddings of `inputs`, which are in `field` of the client's
    request. The prompt that the checkpoint calls `prompt_name` is put before each text.

    Raises:
        InvalidRequest: there are too many inputs, one is empty, or the prompt is not known.
    """
    check_number(field.name, len(inputs))
    check_not_empty(field, inputs)
    before = defaults.lowered(defaults.text_before(prompt_name))
    prompts: list[Prompt] = []
    for each in inputs:
        if isinstance(each, str):
            text = defaults.lowered(each)
            each = TextParts((before, text)) if before else text
        prompts.append(each)
    return GenerationRequest(
        prompts=tuple(prompts),
        options=options,
        model=model,
        texts_field=field,
    )


def score_request(
    pairs: Sequence[tuple[str, str]],
    options: GenerationOptions,
    *,
    format: PairFormat,
    instruction: str | None,
    model: str,
    field: TextsField,
) -> GenerationRequest:
    """Returns the request for the scores of pairs of texts. Call it only with texts that are not
    empty. `field` is the field of the client's request that holds the pairs, or that holds one text
    of each pair.

    Raises:
        InvalidRequest: there are too many pairs, or the client wants long prompts cut off although
        a template makes them.
    """
    if options.truncate_prompt_tokens is not None and not format.is_plain:
        raise errors.InvalidRequest("truncate_prompt_tokens", CUTS_TEMPLATE)
    check_number(field.name, len(pairs))
    return GenerationRequest(
        prompts=tuple(format.prompt(*pair, instruction) for pair in pairs),
        options=options,
        model=model,
        texts_field=field,
    )


def check_number(field: str, n_items: int) -> None:
    """Raises InvalidRequest, naming the field `field`, if the list in this field has more than
    `MAX_ANSWERS` items. Call it before any item is processed."""
    if n_items > MAX_ANSWERS:
        raise errors.InvalidRequest(field, f"has {n_items} items; at most {MAX_ANSWERS} may be")


def check_not_empty(field: TextsField, prompts: Sequence[Prompt]) -> None:
    """Raises InvalidRequest if a prompt is empty. The error names the field of this prompt."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise errors.InvalidRequest(field.item(index), "must not be empty")
