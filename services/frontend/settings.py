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
    """Directory of the checkpoint, or a GGUF file. The frontend reads its tokenizer, its chat
    template and its defaults."""

    served_model_name: ModelNames = ()
    """Names by which clients know the model, separated by commas or given one by one; answers show
    the first. Without any, the model has the name of the workers' directory."""

    generation_config: Literal["auto", "none"] = "auto"
    """Source of the defaults of requests. `auto` takes temperature, top_k, top_p, min_p,
    repetition_penalty and max_new_tokens from the checkpoint's generation_config.json; `none`
    ignores the file."""

    refuse_unknown_fields: bool = False
    """Whether a body with an unknown field is refused, which finds misspelt fields. Otherwise
    unknown fields are ignored, and named in the header `x-orcinus-ignored-fields` of the answer."""

    scheduler: Address
    """Address of the scheduler. If the name has several addresses, calls go to the scheduler that
    leads."""

    http_address: Address = "127.0.0.1:8000"
    """Address at which the HTTP API listens; by default only this machine can reach it."""

    http_socket: Path | None = None
    """Path of a Unix socket at which the HTTP API listens too, always without TLS. Its file has
    mode 0660: the user and the group of the process may connect. A socket that a dead process has
    left is replaced."""

    grpc_address: Address = "127.0.0.1:50051"
    """Address at which the gRPC API listens; by default only this machine can reach it."""

    grpc_socket: Path | None = None
    """Path of a Unix socket at which the gRPC API listens too, under the same rules as
    `http_socket`. All its clients together have the limits of one connection, and a client that
    sends headers without end is not noticed: only trusted users should be able to write to its
    file."""

    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral"] = "auto"
    """Format in which the model calls tools. `auto` finds it from the chat template and the special
    tokens. With `none`, calls are text, and a request cannot require one."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """Format of the model's reasoning. `auto` looks for `</think>` in the chat template. With
    `none`, reasoning is part of the content."""

    public_tls_dir: Path | None = None
    """Directory with `tls.crt` and `tls.key` for clients of both APIs, as a Secret mounts them. The
    files are read again when they change. Without the setting, clients connect in plaintext."""

    api_keys_file: Path | None = None
    """JSON file with the keys that clients must show, see `api_keys.py`. It is read again when it
    changes. Without the setting, anyone may call."""

    cors_origins: Origins = ()
    """Origins, `https://host:port`, of web pages whose scripts may use the HTTP API, separated by
    commas; `*` allows all. Browsers let no other pages use it."""

    max_body_bytes: PositiveInt = 8 * 2**20
    """Largest request in bytes: a million tokens fit, and an upload by mistake does not."""

    max_connections: PositiveInt = 2048
    """Largest number of connections of each API. When another comes, over HTTP the connection that
    has been idle longest is closed, and over gRPC the new one. Each connection takes a file
    descriptor, and the process needs 256 more."""

    max_head_bytes: PositiveInt = 32 * 2**10
    """Largest size of an HTTP request line and its headers, in bytes; for gRPC it is 16 KiB of
    metadata."""

    max_headers: PositiveInt = 100
    """Largest number of headers of an HTTP request."""

    head_limit_s: PositiveFloat = 10.0
    """Seconds for the TLS handshake; and seconds from the first byte of a request, or from the
    connection if it is the first request, until the headers are complete."""

    body_limit_s: PositiveFloat = 60.0
    """Seconds from the end of the headers until the body of a request, or its message, is
    complete."""

    idle_limit_s: PositiveFloat = 75.0
    """Seconds that a connection stays open between requests. Most clients and proxies keep
    connections for less, so that they close them and no request meets a connection that is being
    closed."""

    send_limit_s: PositiveFloat = 30.0
    """Seconds in which a client that does not keep up must read 16 KiB of its answer, or over gRPC
    a message; otherwise the answer ends."""

    comment_s: PositiveFloat = 15.0
    """Seconds without an event after which a stream gets a comment, so that no proxy takes its
    connection for idle. Most proxies wait for a minute, some for half a minute."""

    max_prompt_characters: PositiveInt = 256 * 2**10
    """Largest number of characters of the texts of one call together, and of a conversation as its
    template writes it: some 60,000 tokens of English. Making tokens of so many takes 40 MB of
    memory for English, 115 MB for Chinese and 185 MB for emoji."""

    render_limit_s: PositiveFloat = 1.0
    """Seconds of processor time in which the chat template must write a conversation; most take
    less than a thousandth."""

    max_in_flight: PositiveInt = 4096
    """Largest number of answers in flight, without answers that wait for others of their call. It
    bounds the memory of this process."""

    max_answers_at_once: PositiveInt = 32
    """Largest number of answers of one call that the scheduler has at a time; the next is sent when
    one ends. So one call with many answers does not fill the pool."""

    max_in_flight_bytes: PositiveInt = 64 * 2**20
    """Memory, in bytes, that data of clients may take together: running requests and requests that
    wait, texts of which tokens are made, and output that is not read. A larger request is taken
    only when there is nothing else."""

    page: bool = False
    """Whether `/` is a page that shows the pipeline at work, and `/pipeline/events` tells what the
    scheduler does: to anyone if there are no API keys, else to keys with `may_watch`."""

    max_viewers: PositiveInt = 16
    """Largest number of streams of `/pipeline/events` at once."""

    max_request_s: NonNegativeFloat = 0.0
    """Seconds that a call for text may take, including the time that it waits; 0 sets no limit.
    Clients may set a shorter one for their calls."""

    hold_s: NonNegativeFloat = 30.0
    """Seconds that a new request waits for a pipeline when there is none; 0 refuses it at once. The
    default is longer than the lead takes to pass from one scheduler to another."""

    resume_s: NonNegativeFloat = 600.0
    """Seconds that an accepted request waits, from each loss of a pipeline or scheduler, until it
    goes on. The default is longer than a stage takes to load."""

    linger_s: NonNegativeFloat = 0.0
    """Seconds after a signal to stop in which requests are still taken, while load balancers and
    clients learn that they should turn elsewhere. gRPC connections are renewed twice in that
    time."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to finish after the time to linger."""

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
