"""Settings of a frontend process, from `ORCINUS_*` variables or the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)
from pydantic_settings import NoDecode

from services.common.memory_limit import MIB, PROCESS
from services.common.settings import ModelNames, ServerSettings

MAX_PORT = 65535

PROCESS_BYTES = 112 * MIB
"""Memory, in bytes, of an idle frontend: 82 MiB with a small vocabulary."""

GRAMMARS_BYTES = 176 * MIB
"""Memory, in bytes, of the process that checks grammars, which starts with the first request that
has one: 27 MiB, the vocabulary, which has 23 MiB for 32,000 tokens, and 48 MiB for the grammar that
is being compiled."""

ANSWER_BYTES = 5 * 2**10
"""Memory, in bytes, of an answer in flight, besides its prompt."""

CONNECTION_BYTES = 40 * 2**10
"""Memory, in bytes, of a connection of either API and of a call on it."""

CHARACTER_BYTES = 700
"""Memory, in bytes, for each character of the longest texts while tokens are made of them; emoji
take most."""

VIEWS_BYTES = 2 * MIB
"""Memory, in bytes, of the events that are kept for later viewers."""

VIEWER_BYTES = 5 * MIB // 2
"""Memory, in bytes, of a viewer that does not keep up: all kept events as they were when it came,
and news."""

N_COPIES = 4.25
"""Factor by which the memory of a running prompt exceeds the bytes that are counted for it. A token
counts 40 bytes, and takes 4 more in each of the 32 submissions that a call may have at the
scheduler."""


def _check_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"there is no port above {MAX_PORT}")
    return address


Address = Annotated[str, StringConstraints(pattern=r"^\S+:\d{1,5}$"), AfterValidator(_check_port)]
"""`host:port`; port 0 takes a free one where the frontend listens."""


def _split(value: object) -> object:
    """Returns the items of a list that is separated by commas."""
    if not isinstance(value, str):
        return value
    return tuple(item.strip() for item in value.split(",") if item.strip())


Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,]+)$")]

Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)]


class FrontendSettings(ServerSettings):
    """Settings of one frontend."""

    model: Path
    """Directory of the checkpoint, or a GGUF file; only its tokenizer, chat template and generation
    defaults are read."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one. Answers show
    the first. Without any, the name that the workers report."""

    generation_config: Literal["auto", "none"] = "auto"
    """Source of defaults for fields that a request leaves out. `auto` takes temperature, top_k,
    top_p, min_p, repetition_penalty and max_new_tokens from the checkpoint's
    generation_config.json; `none` ignores that file."""

    refuse_unknown_fields: bool = False
    """Whether a body with an unknown field is refused, which finds misspelt ones. Otherwise unknown
    fields are ignored and named in the answer's header `x-orcinus-ignored-fields`."""

    scheduler: Address
    """Address, host:port, of the schedulers. Where the name has several addresses, the frontend
    finds the one that leads."""

    http_address: Address = "127.0.0.1:8000"
    """Address, host:port, where the HTTP APIs listen. The default is reachable from this machine
    only."""

    http_socket: Path | None = None
    """Path of a Unix socket on which the HTTP APIs are served too, always without TLS, for a proxy
    on the same machine. The file has mode 0660, so the process's user and group may connect. A file
    that a dead process has left is replaced."""

    grpc_address: Address = "127.0.0.1:50051"
    """Address, host:port, where the gRPC API listens. The default is reachable from this machine
    only."""

    grpc_socket: Path | None = None
    """Path of a Unix socket on which the gRPC API is served too, under the rules of `http_socket`.
    All its clients together have the limits of one connection, and a client that sends headers
    without end is not noticed: let only trusted processes write to its file."""

    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral"] = "auto"
    """Format in which the model calls tools. `auto` finds it in the chat template and the special
    tokens. With `none`, calls are ordinary text, and `tool_choice` cannot require one."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Format of the model's reasoning. `auto` looks for `</think>` in the chat template. With
    `none`, reasoning is part of the content."""

    public_tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key` for clients of both APIs, laid out as a mounted
    Secret. Files are read again when they change. When not set, clients speak without TLS."""

    api_keys_file: Path | None = None
    """JSON file with the API keys that clients must show; `python -m services.frontend.api_keys`
    makes entries. Read again when it changes. When not set, no key is asked for."""

    cors_origins: Origins = ()
    """Origins, `https://host:port`, of web pages whose scripts may use the HTTP APIs, separated by
    commas; `*` stands for all. Browsers keep other pages out."""

    max_body_bytes: PositiveInt = 8 * 2**20
    """Largest request body, in bytes. The default holds a prompt of a million tokens and stops
    uploads by mistake."""

    max_connections: PositiveInt = 2048
    """Connections of each API at most; bounds memory and file descriptors, of which the process
    needs 256 more. When there are more, the HTTP connection that has been idle longest is closed,
    or the new gRPC connection."""

    max_head_bytes: PositiveInt = 32 * 2**10
    """Bytes of an HTTP request's line and headers at most; bounds the memory of a connection before
    its key is known. gRPC has 16 KiB of metadata."""

    max_headers: PositiveInt = 100
    """Headers of an HTTP request at most."""

    head_limit_s: PositiveFloat = 10.0
    """Seconds for the TLS handshake, and from connecting, or a request's first byte, until its
    headers are complete. Keeps slow senders from holding connections."""

    body_limit_s: PositiveFloat = 60.0
    """Seconds from the end of the headers until the body of a request, or a gRPC message, is
    complete."""

    idle_limit_s: PositiveFloat = 75.0
    """Seconds that a connection stays open between requests. Longer than most clients and proxies
    keep theirs, so that they close it and no request meets a closing connection."""

    send_limit_s: PositiveFloat = 30.0
    """Seconds in which a client must read 16 KiB of its waiting answer, or a message over gRPC;
    otherwise the answer ends, so that unread output does not fill the memory."""

    comment_s: PositiveFloat = 15.0
    """Seconds without an event after which a stream gets a comment, so that proxies do not close
    the connection as idle; most wait for a minute, some for half of one."""

    max_prompt_characters: PositiveInt = 256 * 2**10
    """Characters that the texts of one call may have together, and a conversation as its template
    writes it; some 60,000 tokens of English. Bounds the memory of tokenizing: 40 MB for English,
    115 MB for Chinese, 185 MB for emoji."""

    render_limit_s: PositiveFloat = 1.0
    """Seconds of processor time in which the chat template must render a conversation; most take
    less than a thousandth. Stops templates that loop."""

    max_in_flight: PositiveInt = 4096
    """Answers in flight at most, without those that wait for others of their call; further calls
    are refused with 429. Bounds this process's memory, at 5 KiB each."""

    max_answers_at_once: PositiveInt = 32
    """Answers of one call that are with the scheduler at a time; the next is submitted when one
    ends. Keeps one call with many answers from filling the pool."""

    max_in_flight_bytes: PositiveInt = 64 * 2**20
    """Bytes of memory that clients' data may take together: requests in flight or held, texts that
    are tokenized, output that is not read. A larger request is taken only when there is nothing
    else."""

    page: bool = False
    """Whether `/` is a page that shows the pipeline at work, and `/pipeline/events` its feed.
    Without API keys every caller may look; with them, callers whose key has `may_watch`.
    """

    max_viewers: PositiveInt = 16
    """Streams of `/pipeline/events` at once at most; each may take 2.5 MiB."""

    max_request_s: NonNegativeFloat = 0.0
    """Seconds that a generating call may take, waiting included; 0 sets no limit. Clients may set a
    shorter one for a call."""

    hold_s: NonNegativeFloat = 30.0
    """Seconds that a new request waits for a pipeline when there is none; 0 refuses it at once.
    Longer than a change of the leading scheduler takes, so that clients do not notice it."""

    resume_s: NonNegativeFloat = 600.0
    """Seconds that an accepted request waits for another pipeline after the loss of its own; then
    it ends with the error `unavailable`. Each loss starts the time anew. Longer than a stage takes
    to load."""

    linger_s: NonNegativeFloat = 0.0
    """Seconds after a signal to stop in which requests are still taken, while load balancers and
    clients learn to go elsewhere. gRPC connections are renewed twice in that time."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to finish after `linger_s`; then they end with the error
    `unavailable`. The pod's grace period must be longer than both together."""

    def memory_parts(self) -> Mapping[str, int]:
        """Returns the largest memory that the frontend may need, in bytes, by setting."""
        views = VIEWS_BYTES + self.max_viewers * VIEWER_BYTES
        return {
            PROCESS: PROCESS_BYTES + GRAMMARS_BYTES,
            "max_in_flight": self.max_in_flight * ANSWER_BYTES,
            "max_in_flight_bytes": int(self.max_in_flight_bytes * N_COPIES),
            "max_connections": 2 * self.max_connections * CONNECTION_BYTES,
            "max_prompt_characters": self.max_prompt_characters * CHARACTER_BYTES,
            **({"max_viewers": views} if self.page else {}),
        }
