"""Clients that send requests all the time, and the answer to each request in an undisturbed
system."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping

from tests.faults.checker import End, Expected, StreamId, Tokens, check
from tests.faults.client import Clients, Log
from tests.faults.workload import Question

MAX_PAUSE_S = 60.0
"""Far more than a recovery takes, also where it is disturbed, and on a busy machine."""


class Crowd:
    """Clients that ask one question after the other until they are told to stop."""

    def __init__(self, clients: Clients, questions: Iterable[Question]) -> None:
        self.sent: dict[str, Question] = {}
        """The question of each request, by the request's name in the log."""
        self.is_over = False
        self._clients = clients
        self._questions = itertools.cycle(questions)

    def expected(self, answers: Mapping[StreamId, Expected]) -> dict[StreamId, Expected]:
        """Returns the expected answer of each request that was sent. `answers` has the streams of
        each question, by the question's name."""
        return {
            StreamId(request, choice): answers[StreamId(question.name, choice)]
            for request, question in self.sent.items()
            for choice in range(question.n_answers)
        }

    async def ask_all_the_time(self) -> None:
        """Asks questions, one at a time."""
        while not self.is_over:
            question = next(self._questions)
            request = f"{question.name} #{len(self.sent)}"
            self.sent[request] = question
            await self._clients.ask(question, request)


async def answers_of(clients: Clients, questions: list[Question]) -> dict[StreamId, Expected]:
    """Sends each question once, and returns the answers by the question's name."""
    clients.log = log = Log()
    await asyncio.gather(*(clients.ask(question, question.name) for question in questions))
    answers = {}
    for question in questions:
        for choice in range(question.n_answers):
            stream = StreamId(question.name, choice)
            pieces = [e for e in log.events if isinstance(e, Tokens) and e.stream == stream]
            [end] = [e for e in log.events if isinstance(e, End) and e.stream == stream]
            answers[stream] = Expected(
                tuple(token for piece in pieces for token in piece.token_ids),
                "".join(piece.text for piece in pieces),
                end.reason,
            )
    assert check(log.events, answers, max_pause_s=MAX_PAUSE_S) == []
    return answers
