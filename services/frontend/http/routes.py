"""The table of all routes that the HTTP API serves.

The app, the OpenAPI document, the page of documentation and the reference in `docs/api.md` are made
from these rows, and from the types in the signatures of the handlers. To add an endpoint, write a
module with the handler and the types of the body and the answer, add a row here, add a test, and
run `python -m tests.api_page`, which writes the reference.
"""

from services.frontend.http.anthropic import errors as anthropic_errors
from services.frontend.http.anthropic.answer import AnthropicMessage
from services.frontend.http.anthropic.count import count_tokens
from services.frontend.http.anthropic.request import MessagesBody
from services.frontend.http.docs import handlers
from services.frontend.http.openai.adapters import load_lora_adapter, unload_lora_adapter
from services.frontend.http.openai.answer import ChatChunk, ChatCompletion, Completion
from services.frontend.http.openai.chat_request import ChatBody
from services.frontend.http.openai.completion_request import CompletionBody
from services.frontend.http.openai.embeddings import Embeddings, create_embeddings
from services.frontend.http.openai.models import list_models, retrieve_model
from services.frontend.http.openai.tokens import detokenize, tokenize
from services.frontend.http.operations import metrics, pipeline_page, probes, receipt_keys
from services.frontend.http.protocol.route import (
    RESUMING,
    Access,
    Route,
    generate,
    get,
    get_openly,
    post,
    post_in_parts,
    probe,
)
from services.frontend.http.ranking.rerank import rerank
from services.frontend.http.ranking.score import create_scores
from services.frontend.http.responses.answer import Response
from services.frontend.http.responses.count import count_input_tokens
from services.frontend.http.responses.request import ResponsesBody
from services.frontend.http.transport.media_types import EVENTS, HTML, TEXT

OPENAPI_PATH = "/openapi.json"

_CHUNKS = (
    "With `stream`. The data of each event is a `{}`, or an `Error` that ends the stream; the last "
    "one of a stream that ends well is `[DONE]`."
)
_NAMED_EVENTS = "With `stream`. Events have a name, which is their `type`, too; the last is {}."

_OPENAI = (
    get("/v1/models", list_models, description="Lists the models that the caller may use."),
    get(
        "/v1/models/{model:path}",
        retrieve_model,
        description="Describes a model, by one of its names.",
        errors=(404,),
        parameters=(
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}},
        ),
    ),
    generate(
        "/v1/completions",
        CompletionBody,
        Completion,
        name="createCompletion",
        description="Continues texts or tokens.",
        stream=_CHUNKS.format("Completion"),
        chunk=Completion,
        parameters=(RESUMING,),
    ),
    generate(
        "/v1/chat/completions",
        ChatBody,
        ChatCompletion,
        name="createChatCompletion",
        description="Continues a conversation.",
        stream=_CHUNKS.format("ChatChunk"),
        chunk=ChatChunk,
        parameters=(RESUMING,),
    ),
    post_in_parts(
        "/v1/embeddings",
        create_embeddings,
        Embeddings,
        description="Makes vectors of texts or tokens.",
    ),
    post("/tokenize", tokenize, description="Makes tokens of a text or a conversation."),
    post("/detokenize", detokenize, description="Makes a text of tokens."),
)

_OTHER_PROTOCOLS = (
    generate(
        "/v1/responses",
        ResponsesBody,
        Response,
        name="createResponse",
        description="Continues a conversation, in OpenAI's protocol for agents.",
        stream=_NAMED_EVENTS.format(
            "`response.completed`, `response.incomplete` or `response.failed`, which has the "
            "`Response`"
        ),
    ),
    post(
        "/v1/responses/input_tokens",
        count_input_tokens,
        checks_room=True,
        description="Counts the tokens that a conversation would start with.",
    ),
    generate(
        "/v1/messages",
        MessagesBody,
        AnthropicMessage,
        name="createMessage",
        description="Continues a conversation, in Anthropic's protocol.",
        stream=_NAMED_EVENTS.format("`message_stop`, or `error` with an `AnthropicError`"),
        dialect=anthropic_errors.DIALECT,
    ),
    post(
        "/v1/messages/count_tokens",
        count_tokens,
        checks_room=True,
        description="Counts the tokens that a conversation would start with.",
        dialect=anthropic_errors.DIALECT,
    ),
)

_RANKING = (
    post(
        "/v1/score",
        create_scores,
        checks_room=True,
        description="Scores pairs of texts, as vLLM does.",
    ),
    post(
        "/v1/rerank",
        rerank,
        checks_room=True,
        description="Orders documents by their scores for a query, as Jina and vLLM do.",
    ),
    post(
        "/v2/rerank",
        rerank,
        name="rerankV2",
        checks_room=True,
        description="Orders documents by their scores for a query, under Cohere's path.",
    ),
)

_ADAPTERS = (
    post(
        "/v1/load_lora_adapter",
        load_lora_adapter,
        description="Loads an adapter (LoRA), as vLLM does; with API keys, for those that may "
        "`manage`. Only where the workers' setting `allowed_adapter_sources` allows the source.",
        access=Access.MANAGE,
        errors=(403, 503),
    ),
    post(
        "/v1/unload_lora_adapter",
        unload_lora_adapter,
        description="Unloads an adapter that was loaded; with API keys, for those that may "
        "`manage`.",
        access=Access.MANAGE,
        errors=(503,),
    ),
)

_WATCHING = (
    Route(
        method="GET",
        path="/pipeline/events",
        handler=pipeline_page.watch,
        name="watchPipeline",
        description="Streams the scheduler's view, one JSON object per change, until the client "
        "goes; with `?decisions=true` also what the scheduling core is told. Only where the "
        "setting `page` is on; with API keys, for accounts that `may_watch`.",
        access=Access.WATCH,
        media_type=EVENTS,
        parameters=(
            {
                "name": pipeline_page.DECISIONS,
                "in": "query",
                "schema": {"type": "boolean", "default": False},
                "description": "Whether to tell also what the scheduling core is told.",
            },
            {
                "name": pipeline_page.MODEL,
                "in": "query",
                "schema": {"type": "string"},
                "description": "Name of the model to watch; needed only if there are several.",
            },
        ),
    ),
    Route(method="GET", path="/", handler=pipeline_page.index, access=Access.ANY, media_type=HTML),
    Route(method="GET", path="/page/{name:path}", handler=pipeline_page.file, access=Access.ANY),
)

_OF_SERVER = (
    probe("/health", probes.health, description="Says that the process is up; needs no key."),
    probe("/ready", probes.ready, description="Says whether to send requests here; needs no key."),
    probe(
        "/serving",
        probes.serving,
        description="Says whether requests get tokens, or why not; needs no key.",
    ),
    get_openly("/version", probes.version, description="Tells the server's version; needs no key."),
    Route(
        method="GET",
        path=OPENAPI_PATH,
        handler=handlers.openapi,
        name="openapi",
        description="Describes these routes; needs no key.",
        access=Access.ANY,
    ),
    Route(
        method="GET",
        path="/docs",
        handler=handlers.docs,
        name="docs",
        description="Shows the description of these routes as a page; needs no key.",
        access=Access.ANY,
        media_type=HTML,
    ),
)

_METRICS = (
    Route(
        method="GET",
        path="/metrics",
        handler=metrics.metrics,
        name="metrics",
        description="Tells the metrics of this process for Prometheus. Only where the setting "
        "`api_metrics` is on.",
        media_type=TEXT,
    ),
)


_RECEIPTS = (
    Route(
        method="GET",
        path=receipt_keys.PATH,
        handler=receipt_keys.receipt_keys,
        name="receiptKeys",
        description="Tells the public keys that check receipts; needs no key. Only where the "
        "setting `receipts` is on.",
        access=Access.ANY,
        answer=receipt_keys.ReceiptKeys,
    ),
)


def served_routes(
    *, has_page: bool, has_metrics: bool, has_receipts: bool = False
) -> tuple[Route, ...]:
    """Returns the routes of a server. `has_page` says whether the server has the page that shows
    the pipeline, `has_metrics` whether it has the metrics, and `has_receipts` whether it makes
    receipts."""
    return (
        *_OPENAI,
        *_OTHER_PROTOCOLS,
        *_RANKING,
        *_ADAPTERS,
        *(_WATCHING if has_page else ()),
        *_OF_SERVER,
        *(_METRICS if has_metrics else ()),
        *(_RECEIPTS if has_receipts else ()),
    )


ROUTES = served_routes(has_page=False, has_metrics=False)
"""Routes that every server has, without the routes of the page, of the metrics and of the
receipts."""
