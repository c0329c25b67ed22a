"""Answers a request for generated answers, whole or as a stream. The steps are the same for all
protocols; each protocol has a class for the body and a class for the reply.

    body → to_request → Generation → reply → one JSON, or a stream of events
"""

import asyncio
from collections.abc import Iterable

from starlette.responses import Response

from services.frontend.api_keys import Account
from services.frontend.generation.generation import Generation
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.transport.event_outlet import EventOutlet
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import EventStream
from services.frontend.http.transport.media_types import JSON
from services.frontend.models.served_models import ServedModels
from services.frontend.request.json_schema.unenforced import SEPARATOR, shown
from services.frontend.request.logprobs import MANY_LOGPROBS

UNENFORCED = "x-orcinus-unenforced"
"""Header of an answer with the keywords of JSON schemas that are not enforced."""

LEFT_OUT = "x-orcinus-left-out"
"""Header of an answer with the fields whose values the chat template leaves out of the prompt."""


def stream_reply(
    models: ServedModels, body: RequestBody, account: Account, *, comment_s: float
) -> EventStream:
    """Returns the reply as a stream. Opening the generation and reading its pieces may fail: an
    error before the stream has started is raised, and a later error becomes the last event."""
    writer: RequestBody | Reply = body

    async def write(output: EventOutput) -> None:
        nonlocal writer
        with body.in_own_words():
            async with models.prepare(body.to_request(), account) as generation:
                reply = _reply(body, generation)
                # The headers may be sent before the request is accepted.
                output.add_headers(_headers(body, generation, reply))
                await generation.start()
                writer = reply
                await output.start()
                for event in reply.begin():
                    await output.write(event)
                outlet = EventOutlet.of(output, reply.events, reply.text_event)
                async for piece in generation.pieces(outlet):
                    events = reply.events(piece)
                    if piece.n_logprobs > MANY_LOGPROBS:
                        events = await asyncio.to_thread(list, events)
                    for event in events:
                        await output.write(event)
        for event in reply.end():
            await output.write(event)

    return EventStream(write, explain=lambda error: writer.explain(error), comment_s=comment_s)


async def whole_reply(models: ServedModels, body: RequestBody, account: Account) -> Response:
    """Returns the whole reply. Raises any error that occurs while the generation is opened or its
    pieces are read."""
    with body.in_own_words():
        async with models.open(body.to_request(), account) as generation:
            pieces = await generation.complete()
            reply = _reply(body, generation)
            parts = reply.whole(pieces)
            if sum(piece.n_logprobs for piece in pieces) > MANY_LOGPROBS:
                data = await asyncio.to_thread(b"".join, parts)
            elif len(pieces) == 1:
                data = b"".join(parts)
            else:
                data = await _joined_in_turns(parts)
            return Response(data, media_type=JSON, headers=_headers(body, generation, reply))


def _reply(body: RequestBody, generation: Generation) -> Reply:
    """Makes the reply to a body. Sets the attribute `unenforced` of the reply to the names of the
    fields and keywords that are not enforced."""
    reply = body.reply(generation)
    reply.unenforced = shown([*map(body.spelled, generation.unenforced), *body.unenforced])
    return reply


def _headers(body: RequestBody, generation: Generation, reply: Reply) -> dict[str, str]:
    """Returns the headers of an answer, which name the fields of the request that are not
    enforced, or that the model does not see."""
    left_out = [body.spelled(name) for name in generation.left_out]
    names = {UNENFORCED: reply.unenforced, LEFT_OUT: left_out}
    return {header: SEPARATOR.join(found) for header, found in names.items() if found}


async def _joined_in_turns(parts: Iterable[bytes]) -> bytes:
    """Joins the parts of a reply. There may be thousands of parts, so other tasks may run after
    each part."""
    joined = bytearray()
    for part in parts:
        joined += part
        await asyncio.sleep(0)
    return bytes(joined)
