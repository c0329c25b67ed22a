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
"""Memory of a frontend that nobody uses: 82 MiB with a small vocabulary."""

GRAMMARS_BYTES = 176 * MIB
"""Memory of the process that checks grammars, from the first request with one: 27 MiB, the
vocabulary, which has 23 MiB for 32,000 tokens, and 48 MiB for the grammar that is compiled."""

ANSWER_BYTES = 5 * 2**10
"""Memory of an answer in the making, besides its prompt."""

CONNECTION_BYTES = 40 * 2**10
"""Memory of a connection of either API, and of a call on it."""

CHARACTER_BYTES = 700
"""Memory for each character of the longest texts while tokens are made of them: that of emoji."""

VIEWS_BYTES = 2 * MIB
"""Memory of what is kept for viewers who come later."""

VIEWER_BYTES = 5 * MIB // 2
"""Memory of a viewer who does not keep up: all of that as it was when it came, and news."""

N_COPIES = 4.25
"""Memory that a prompt in the making takes in all, for each byte that is counted: 40 for a token,
and 4 more in each of the 32 submissions that one call has with the scheduler at a time."""


def _check_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"there is no port above {MAX_PORT}")
    return address


Address = Annotated[str, StringConstraints(pattern=r"^\S+:\d{1,5}$"), AfterValidator(_check_port)]
"""`host:port`; port 0 takes a free one where the frontend listens."""


def _split(value: object) -> object:
    """Returns the items of a list that is written with commas."""
    if not isinstance(value, str):
        return value
    return tuple(item.strip() for item in value.split(",") if item.strip())


Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,]+)$")]

Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)]


class FrontendSettings(ServerSettings):
    """Settings of one frontend."""

    model: Path
    """Directory of the checkpoint, or a GGUF file. Its tokenizer, its chat template and its
    defaults are read."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one; the first one
    is shown in answers. Without any it is the name of the workers' directory."""

    generation_config: Literal["auto", "none"] = "auto"
    """Where requests have their defaults from: `auto` takes temperature, top_k, top_p, min_p,
    repetition_penalty and max_new_tokens of the checkpoint's generation_config.json; `none` ignores
    it."""

    refuse_unknown_fields: bool = False
    """Whether a body with a field that nobody knows is refused, which finds misspelt ones.
    Otherwise such fields are ignored, and named in the answer's header `x-orcinus-ignored-fields`.
    """

    scheduler: Address
    """Where the scheduler listens. Where a name has several addresses, calls go to the one whose
    scheduler leads."""

    http_address: Address = "127.0.0.1:8000"
    """Where the OpenAI API listens; this machine only unless told otherwise."""

    http_socket: Path | None = None
    """Path of a Unix socket where the OpenAI API listens too, always without TLS. Its file has mode
    0660: the process's user and group may connect. One that a dead process has left is replaced."""

    grpc_address: Address = "127.0.0.1:50051"
    """Where the gRPC API listens; this machine only unless told otherwise."""

    grpc_socket: Path | None = None
    """Path of a Unix socket where the gRPC API listens too, under the same rules as `http_socket`.
    All its clients together have the limits of one connection, and those who send headers without
    end are not noticed: only who is trusted may write to its file."""

    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral"] = "auto"
    """Format in which the model calls tools; `auto` finds it in the chat template and the special
    tokens. With `none`, calls are text, and none can be required."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Format of the model's reasoning; `auto` looks for `</think>` in the chat template. With
    `none`, it is part of the content."""

    public_tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key` for clients of both APIs, as a Secret mounts them;
    read again when they change. Without it clients speak in plaintext."""

    api_keys_file: Path | None = None
    """JSON file with the keys that clients must show, see `api_keys.py`; read again when it
    changes. Without it anybody may call."""

    cors_origins: Origins = ()
    """Origins, `https://host:port`, of web pages whose scripts may use the OpenAI API, separated by
    commas; `*` stands for all. Browsers let no others."""

    max_body_bytes: PositiveInt = 8 * 2**20
    """Largest request in bytes: a million tokens fit, an upload by mistake does not."""

    max_connections: PositiveInt = 2048
    """Connections of each API at most. When there are more, the HTTP connection that has been idle
    longest is closed, and a new one of gRPC. Each takes a file descriptor, and the process needs
    256 more."""

    max_head_bytes: PositiveInt = 32 * 2**10
    """Bytes of an HTTP request's line and headers at most; gRPC has 16 KiB of metadata."""

    max_headers: PositiveInt = 100
    """Headers of an HTTP request at most."""

    head_limit_s: PositiveFloat = 10.0
    """Seconds for the handshake of TLS, and from a request's first byte, or from connecting, until
    its headers are complete."""

    body_limit_s: PositiveFloat = 60.0
    """Seconds from there until the body of a request, or its message, is complete."""

    idle_limit_s: PositiveFloat = 75.0
    """Seconds that a connection stays open between requests. That is longer than most clients
    and proxies keep theirs, so that they close it and no request meets a connection that is being
    closed."""

    send_limit_s: PositiveFloat = 30.0
    """Seconds in which a client that does not keep up must read 16 KiB of its answer, or a message
    over gRPC; else the answer ends."""

    comment_s: PositiveFloat = 15.0
    """Seconds without an event after which a stream gets a comment, so that no proxy takes its
    connection for idle; most wait for a minute, some for half of one."""

    max_prompt_characters: PositiveInt = 256 * 2**10
    """Characters that the texts of one call may have together, and a conversation as its template
    writes it: some 60,000 tokens of English. Making tokens of so many takes 40 MB of memory for
    English, 115 MB for Chinese and 185 MB for emoji."""

    render_limit_s: PositiveFloat = 1.0
    """Seconds of a processor in which the chat template must write a conversation down; most take
    less than a thousandth."""

    max_in_flight: PositiveInt = 4096
    """Answers in the making at most, without those that wait for others of their call: bounds this
    process's memory."""

    max_answers_at_once: PositiveInt = 32
    """Answers of one call that the scheduler has at a time; the next comes when one ends. So one
    call with many answers does not fill the pool."""

    max_in_flight_bytes: PositiveInt = 64 * 2**20
    """Memory that clients' data may take together: requests in the making, or held, texts of which
    tokens are made, and output that is not read. What is larger is taken when there is nothing
    else."""

    page: bool = False
    """Whether `/` is a page that shows the pipeline at work, and `/pipeline/events` tells what the
    scheduler does: to anybody where there are no API keys, else to keys with `may_watch`."""

    max_viewers: PositiveInt = 16
    """Streams of `/pipeline/events` at once at most."""

    max_request_s: NonNegativeFloat = 0.0
    """Seconds that a call for text may take, waiting included; 0 sets no limit. Clients may set
    themselves a shorter one."""

    hold_s: NonNegativeFloat = 30.0
    """Seconds that a new request waits for a pipeline when there is none; 0 refuses it at once.
    Longer than a change of the leading scheduler takes."""

    resume_s: NonNegativeFloat = 600.0
    """Seconds that a request which a scheduler had taken waits, from each loss, until it goes on;
    longer than a stage takes to load."""

    linger_s: NonNegativeFloat = 0.0
    """Seconds after a signal to stop in which requests are still taken, while load balancers and
    clients learn that they should go elsewhere; gRPC connections are renewed twice in that time."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to finish after a signal to stop."""

    def memory_parts(self) -> Mapping[str, int]:
        """Returns the memory that the frontend may need at most, in bytes, by setting."""
        views = VIEWS_BYTES + self.max_viewers * VIEWER_BYTES
        return {
            PROCESS: PROCESS_BYTES + GRAMMARS_BYTES,
            "max_in_flight": self.max_in_flight * ANSWER_BYTES,
            "max_in_flight_bytes": int(self.max_in_flight_bytes * N_COPIES),
            "max_connections": 2 * self.max_connections * CONNECTION_BYTES,
            "max_prompt_characters": self.max_prompt_characters * CHARACTER_BYTES,
            **({"max_viewers": views} if self.page else {}),
        }
