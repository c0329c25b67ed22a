"""Settings of a frontend process, from `ORCINUS_*` variables or the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)
from pydantic_settings import NoDecode

from services.common.by_model import ByModel, names_in, value_for
from services.common.context_length import context_length
from services.common.memory_limit import MIB, PROCESS
from services.common.settings import HostPort, ModelNames, ServerSettings, Target
from services.frontend.model_settings import ModelSettings, ReasoningParser, ToolParser

PROCESS_BYTES = 112 * MIB
"""Bytes of memory reserved for an idle frontend. It takes 82 MiB with a small vocabulary, and keeps
up to 8 MiB of translations of tools' schemas (`translations.MAX_BYTES`)."""

GRAMMARS_BYTES = 256 * MIB
"""Bytes of memory reserved for the process that checks grammars, which starts with the first
request that has a grammar. The process itself takes 27 MiB, a vocabulary of 32,000 tokens 23 MiB,
and the grammar that is being compiled 128 MiB."""

FURTHER_MODEL_BYTES = 64 * MIB
"""Bytes of memory reserved for the tokenizer, the chat template and the texts of tokens of each
model after the first."""

ANSWER_BYTES = 5 * 2**10
"""Memory, in bytes, of an answer in flight, besides its prompt."""

CONNECTION_BYTES = 40 * 2**10
"""Memory, in bytes, of a connection of either API and of a call on it."""

FEWEST_CHARACTERS = 256 * 2**10
"""Smallest default of `max_prompt_characters`, for any model: about 60,000 tokens of English."""

CHARACTER_BYTES = 700
"""Bytes of memory that tokenizing takes for each character of a text, up to `FEWEST_CHARACTERS`
characters. Emoji take most."""

FURTHER_CHARACTER_BYTES = 144
"""Bytes of memory that tokenizing takes for each character beyond `FEWEST_CHARACTERS`. So long a
text is tokenized only if most of its tokens have many characters. 60 bytes were measured for
English letters and 115 for Greek ones; the rendered text is also in memory."""

CONTEXT_CHARACTERS = 16
"""The default of `max_prompt_characters` is this number times the model's context in tokens. Texts
have three to five characters per token, tables and indented programs up to ten."""

ASSUMED_CONTEXT = 131_072
"""Length of the model's context, in tokens, that is assumed if the model's files do not state
it."""

VIEWS_BYTES = 2 * MIB
"""Bytes of memory of the events that are kept for viewers who connect later."""

VIEWER_BYTES = 5 * MIB // 2
"""Bytes of memory of a viewer that reads too slowly: all kept events at the time when the viewer
connected, and the events since then."""

N_COPIES = 4.25
"""Factor by which the memory of a running prompt exceeds the bytes that the memory budget counts
for it. A token is counted with 40 bytes. It takes 4 more in each of the 32 submissions that a call
may have at the scheduler."""


def _split(value: object) -> object:
    """Returns the items of a text that is a list separated by commas. Returns any other value as it
    is."""
    if not isinstance(value, str):
        return value
    return tuple(item.strip() for item in value.split(",") if item.strip())


Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,]+)$")]

Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)]


class FrontendSettings(ServerSettings):
    """Settings of one frontend."""

    model: ByModel[Path]
    """Directory of the checkpoint, or a GGUF file; only its tokenizer, chat template and generation
    defaults are read. To serve several models, give `NAME=DIRECTORY` for each. NAME is the name by
    which clients know the model."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one. Answers show
    the first name. If no name is given, the name that the workers report is used. Use it only if
    `model` gives the model no name."""

    generation_config: Literal["auto", "none"] = "auto"
    """Source of defaults for fields that a request leaves out. `auto` takes temperature, top_k,
    top_p, min_p, repetition_penalty and max_new_tokens from the checkpoint's
    generation_config.json; `none` ignores that file."""

    refuse_unknown_fields: bool = False
    """Whether a body with an unknown field is refused, which finds misspelt fields. Otherwise
    unknown fields are ignored and named in the answer's header `x-orcinus-ignored-fields`."""

    scheduler: ByModel[Target]
    """Address, host:port, of the schedulers. If the host name has several addresses, the frontend
    finds the scheduler that leads. Several addresses are given as gRPC writes them:
    `ipv4:10.0.0.1:50052,10.0.0.2:50052`. For several models, give `NAME=ADDRESS` for each."""

    http_address: HostPort = "localhost:8000"
    """Address, host:port, where the HTTP APIs listen. The host `::` or `0.0.0.0` stands for all
    addresses of the machine, of both families. The default is reachable from this machine only."""

    http_socket: Path | None = None
    """Path of a Unix socket on which the HTTP APIs are served too, always without TLS, for a proxy
    on the same machine. The file has mode 0660, so the process's user and group may connect. A file
    left by a process that has ended is replaced."""

    grpc_address: HostPort = "localhost:50051"
    """Address, host:port, where the gRPC API listens. The default is reachable from this machine
    only."""

    share_ports: bool = False
    """Whether other frontends of the same user on this machine may listen at `http_address` and
    `grpc_address`, too, if they have this setting. The kernel gives each new connection to one of
    them. So when one frontend ends, clients that connect again reach another one at once."""

    grpc_socket: Path | None = None
    """Path of a Unix socket on which the gRPC API is served too, under the rules of `http_socket`.
    All clients of the socket together have the limits of one connection, and a client that sends
    headers without end is not noticed: let only trusted processes write to the file."""

    tool_parser: ByModel[ToolParser] = (("", "auto"),)
    """Format in which the model calls tools. `auto` derives the format from the chat template and
    the special tokens. If no format is found, or with `none`, calls are ordinary text, and
    `tool_choice` cannot require one. `NAME=FORMAT` is for one of several models."""

    reasoning_parser: ByModel[ReasoningParser] = (("", "auto"),)
    """Format in which the model writes reasoning. `auto` looks in the chat template for the marks
    of each format. With `none`, reasoning is part of the content. `NAME=FORMAT` is for one of
    several models."""

    pair_template: ByModel[str] = ()
    """Prompt of models that score pairs, with the places `{query}`, `{document}` and
    `{instruction}` for the texts of `/v1/score` and `/v1/rerank`. When empty, checkpoints with a
    classification head get the two texts as a pair, and other checkpoints get the prompt of
    Qwen3-Reranker. `NAME=PROMPT` is for one of several models."""

    additional_properties: Literal["declared", "allowed"] = "declared"
    """Which members an object may have if its JSON schema has `properties` and does not say whether
    other members are allowed. `declared` allows only the declared ones, which keeps small models
    from inventing members. `allowed` allows any other member too, as JSON Schema does."""

    public_tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key` for clients of both APIs, laid out as a mounted
    Secret. Files are read again when they change. When not set, clients speak without TLS."""

    api_keys_file: Path | None = None
    """JSON file with the API keys that clients must show; `python -m services.frontend.api_keys`
    makes entries. The file is read again when it changes. When not set, no key is asked for."""

    receipts: Literal["off", "on_request", "always"] = "off"
    """Which answers get signed receipts, which say how the answer was made: none (`off`), the
    answers to requests with `receipt` (`on_request`), or all (`always`). The workers need the same
    setting."""

    receipt_keys_file: Path | None = None
    """File with Ed25519 keys in PEM that sign receipts, as `orcinus receipt-key` makes it. The
    first key signs. All are published at `/.well-known/orcinus-keys.json`, also earlier ones of
    which only the public key is left. The file is read again when it changes. Needed with
    `receipts`."""

    receipt_prompts: Literal["tokens", "digest"] = "tokens"
    """What receipts say about the prompt: the tokens, or a digest of the tokens with a random
    salt."""

    cors_origins: Origins = ()
    """Origins, `https://host:port`, of web pages whose scripts may use the HTTP APIs, separated by
    commas; `*` stands for all. Browsers keep other pages out."""

    max_body_bytes: PositiveInt = 8 * 2**20
    """Largest request body, in bytes. The default holds a prompt of a million tokens and stops
    uploads by mistake."""

    max_connections: PositiveInt = 2048
    """Largest number of connections of each API. The number bounds memory and file descriptors; the
    process needs 256 further descriptors. Beyond the limit, the HTTP API closes the connection that
    has been idle longest, and the gRPC API closes the new connection."""

    max_head_bytes: PositiveInt = 32 * 2**10
    """Largest size of an HTTP request's line and headers together, in bytes; bounds the memory of a
    connection before its API key is known. The metadata of a gRPC call may have 16 KiB."""

    max_headers: PositiveInt = 100
    """Largest number of headers of an HTTP request."""

    head_limit_s: PositiveFloat = 10.0
    """Seconds within which the TLS handshake must be complete, and within which the headers of a
    request must be complete, counted from connecting or from the request's first byte. Keeps slow
    senders from holding connections."""

    body_limit_s: PositiveFloat = 60.0
    """Seconds from the end of the headers until the body of a request, or a gRPC message, is
    complete."""

    idle_limit_s: PositiveFloat = 75.0
    """Seconds that a connection stays open between requests. The default is longer than the limit
    of most clients and proxies, so that the client closes the connection, and no request is sent on
    a connection that the frontend is closing."""

    client_silence_limit_s: float = Field(default=120.0, ge=0.1, le=86400)
    """Seconds without a sign of a client's host, such as an acknowledged packet or an answered
    ping, after which the connection of the client is closed and its requests are cancelled. Over
    gRPC this takes up to a quarter longer. Streams survive a break of the network of half that
    time, because TCP tries again at growing intervals."""

    send_limit_s: PositiveFloat = 30.0
    """Seconds in which a client must read 16 KiB of the output that waits for it, or one message
    over gRPC. Otherwise the answer ends, because unread output would fill the memory."""

    comment_s: PositiveFloat = 15.0
    """Seconds without an event after which a stream gets a comment, so that proxies do not close
    the connection as idle. Most proxies wait for a minute, some for half a minute."""

    max_prompt_characters: NonNegativeInt = 0
    """Largest number of characters of all texts of one call together, and of a conversation as the
    chat template renders it. The default 0 means 16 characters for each token of the context that
    the model's files state, but at least 262,144 and at most `max_body_bytes`; for a context of
    131,072 tokens it means 2,097,152. The limit bounds the memory of tokenizing: 185 MB for 262,144
    characters, and 144 bytes for each further one."""

    strict_max_tokens: bool = False
    """Whether a request is refused if its prompt and `max_tokens` together exceed the model's
    context. If not, `max_tokens` is lowered to the number of tokens that the prompt leaves free in
    the context."""

    api_metrics: bool = False
    """Whether the HTTP API has `/metrics`, the metrics of this process for Prometheus, in addition
    to `metrics_address`. With API keys the route needs a key."""

    render_limit_s: PositiveFloat = 1.0
    """Seconds of processor time in which the chat template must render a conversation. Most
    templates take less than a thousandth of the default. The limit stops templates that loop."""

    max_in_flight: PositiveInt = 4096
    """Largest number of answers in flight. Answers that wait for other answers of the same call do
    not count. Further calls are refused with 429. The limit bounds the memory of this process; an
    answer takes 5 KiB."""

    max_answers_at_once: PositiveInt = 32
    """Largest number of answers of one call that the scheduler has at a time; the next answer is
    submitted when one ends. The limit keeps one call with many answers from filling the pool."""

    max_in_flight_bytes: PositiveInt = 64 * 2**20
    """Bytes of memory that the data of all clients may take together: requests in flight or held,
    texts that are being tokenized, and output that is not read. A request that is larger than the
    limit is taken only while there is no other data."""

    page: bool = False
    """Whether `/` is a page that shows the pipeline at work, and `/pipeline/events` the stream of
    events for the page. Without API keys, every caller may read both. With API keys, only callers
    whose key has `may_watch` may.
    """

    max_viewers: PositiveInt = 16
    """Largest number of streams of `/pipeline/events` at a time, for each model; each stream may
    take 2.5 MiB."""

    max_request_s: NonNegativeFloat = 0.0
    """Seconds that a generating call may take, waiting included; 0 sets no limit. Clients may set a
    shorter limit for a call."""

    hold_s: NonNegativeFloat = 30.0
    """Seconds that a new request waits for a pipeline when there is none; 0 refuses the request at
    once. The default is longer than a change of the leading scheduler takes, so that clients do not
    notice the change."""

    wake_s: NonNegativeFloat = 600.0
    """Seconds that a new request waits for a pipeline while the model is asleep or starts, where
    the scheduler's `min_pipelines` is 0. Must exceed the time in which workers start and load their
    weights."""

    resume_s: NonNegativeFloat = 600.0
    """Seconds that an accepted request waits for another pipeline after its pipeline is lost. Then
    the request ends with the error `unavailable`. Each loss starts the time anew, for at most
    five losses in a row without a token in between. The default is longer than a stage takes to
    load."""

    linger_s: NonNegativeFloat = 0.0
    """Seconds after a signal to stop in which requests are still taken. In this time, load
    balancers and clients learn to use other frontends. gRPC connections are renewed twice in that
    time. This time ends at the latest 5 s before `drain_s` is over, so `drain_s` should be
    longer."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds from a signal to stop until this process has ended, `linger_s` included. The process
    ends as soon as all its requests have ended. Requests that still run 5 s before the end get the
    error `unavailable`. In Kubernetes this is also the pod's grace period."""

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """The settings of each model, in one object per model. If there is only one model, its name
        may be empty."""
        return tuple(
            ModelSettings(
                path=path,
                scheduler=value_for(name, self.scheduler) or "",
                names=(name,) if name else self.served_model_name,
                tool_parser=value_for(name, self.tool_parser) or "auto",
                reasoning_parser=value_for(name, self.reasoning_parser) or "auto",
                pair_template=value_for(name, self.pair_template) or "",
            )
            for name, path in self.model
        )

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = names_in(self.model)
        if len(self.model) > len(names) and len(self.model) > 1:
            raise ValueError("model: several models need a name each: NAME=DIRECTORY")
        if names and self.served_model_name:
            raise ValueError("served_model_name: not together with a NAME in `model`")
        for setting in ("scheduler", "tool_parser", "reasoning_parser", "pair_template"):
            for name in names_in(getattr(self, setting)):
                if name not in names:
                    raise ValueError(f"{setting}: `model` has no model named {name}")
        for name in names if len(names) > 1 else ():
            if name not in names_in(self.scheduler):
                raise ValueError(f"scheduler: the model {name} has no address: NAME=ADDRESS")
        return self

    @model_validator(mode="after")
    def _check_pair_template(self) -> Self:
        for _, template in self.pair_template:
            for place in ("{query}", "{document}") if template else ():
                if place not in template:
                    raise ValueError(f"pair_template: has no place {place}")
        return self

    @model_validator(mode="after")
    def _check_receipts(self) -> Self:
        if self.receipts != "off" and self.receipt_keys_file is None:
            raise ValueError(
                f"receipt_keys_file: must be given with receipts={self.receipts}; "
                "`orcinus receipt-key FILE` makes one"
            )
        return self

    def n_prompt_characters(self, model: Path) -> int:
        """Returns the largest number of characters that all texts of one call to a model may have
        together. `model` is the path of the model's files."""
        if self.max_prompt_characters:
            return self.max_prompt_characters
        context = context_length(model) or ASSUMED_CONTEXT
        return max(FEWEST_CHARACTERS, min(CONTEXT_CHARACTERS * context, self.max_body_bytes))

    def memory_parts(self) -> Mapping[str, int]:
        """Returns the largest memory, in bytes, that each part of the frontend may need, keyed by
        the setting that limits the part."""
        n_models = len(self.model)
        views = n_models * (VIEWS_BYTES + self.max_viewers * VIEWER_BYTES)
        n_characters = max(self.n_prompt_characters(path) for _, path in self.model)
        further_models = (n_models - 1) * (FURTHER_MODEL_BYTES + GRAMMARS_BYTES)
        return {
            PROCESS: PROCESS_BYTES + GRAMMARS_BYTES,
            **({"model": further_models} if further_models else {}),
            "max_in_flight": self.max_in_flight * ANSWER_BYTES,
            "max_in_flight_bytes": int(self.max_in_flight_bytes * N_COPIES),
            "max_connections": 2 * self.max_connections * CONNECTION_BYTES,
            "max_prompt_characters": _text_bytes(n_characters),
            **({"max_viewers": views} if self.page else {}),
        }


def _text_bytes(n_characters: int) -> int:
    """Returns the memory, in bytes, that tokenizing a text takes."""
    n_further = max(0, n_characters - FEWEST_CHARACTERS)
    return (n_characters - n_further) * CHARACTER_BYTES + n_further * FURTHER_CHARACTER_BYTES
