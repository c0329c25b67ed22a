"""Whole replies and streams of them, over the one implementation of generations.

Such streams cannot be resumed, and end with an event of their own.
"""

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.generation_service import GenerationService
from services.frontend.http.openai.reply import Json
from services.frontend.http.protocol.conversation_body import GeneratingBody
from services.frontend.http.protocol.reply import Reply
from services.frontend.http.transport.event_outlet import EventOutlet
from services.frontend.http.transport.event_output import EventOutput
from services.frontend.http.transport.event_stream import Event


class ReplyStream:
    """The events of one answer, and of the error that may end them."""

    def __init__(self, service: GenerationService, body: GeneratingBody, account: Account) -> None:
        self._service = service
        self._body = body
        self._account = account
        self._reply: Reply | None = None

    async def write(self, output: EventOutput) -> None:
        """Writes the events to the output; raises what opening the generation and reading its
        pieces raise."""
        body = self._body
        with body.in_own_words():
            async with self._service.open(body.to_request(), self._account) as generation:
                self._reply = reply = body.reply(generation)
                for event in reply.begin():
                    await output.write(event)
                async for piece in generation.pieces(EventOutlet.of(output, reply.events)):
                    for event in reply.events(piece):
                        await output.write(event)

    def explain(self, error: errors.OrcinusError) -> Event:
        """Returns the last event of a stream that fails."""
        writer = self._body if self._reply is None else self._reply
        return writer.explain(error)


async def whole_reply(service: GenerationService, body: GeneratingBody, account: Account) -> Json:
    """Returns a complete answer; raises what opening the generation and reading its pieces
    raise."""
    with body.in_own_words():
        async with service.open(body.to_request(), account) as generation:
            (piece,) = await generation.complete()
            return body.reply(generation).whole(piece)
