"""Carries out the commands of frontends to load and unload adapters.

    load: check → a pipeline loads the adapter → the list has it → the frontend gets an answer
    unload: the list drops it → the frontend gets an answer → the ranks drop it when unused

Every frontend has a copy of the leader's list of adapters. A new leader gets the lists of all
frontends and goes on with the newest entry of each name.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import AdapterOutcome

from services.common.adapter_list import AdapterEntry, AdapterList
from services.common.adapter_sources import SourceRefused, check_form
from services.common.adapters import adapters_in, check_name, max_loaded_in
from services.scheduler.core.admission.adapter_gate import SharedAdapters, WantedLoad

log = logging.getLogger(__name__)

COMMAND_LIMIT_S = 90.0
"""A load is given up if no pipeline has carried it out within this many seconds. The ranks of one
pipeline have less time than this for a load."""

MAX_COMMANDS = 32
"""Largest number of loads that clients wait for at a time."""

MAX_DIGEST_LENGTH = 64
"""Largest number of characters of a digest."""

MAX_VERSION = 2**62
"""Limit of the versions of valid entries: lower than the largest number that a message can hold, so
that later entries can have higher versions."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended: its outcome, and for a failure a message and the name of the invalid
    field."""

    outcome: AdapterOutcome
    message: str = ""
    field: str = ""


OnAnswer = Callable[[Answer], None]
"""A function that is called with the answer to a command, when the command has ended."""

_DONE = Answer(AdapterOutcome.ADAPTER_OUTCOME_DONE)


class AdapterCommands:
    """Carries out the commands of frontends to load and to unload adapters, and keeps the list of
    the adapters that such commands have loaded."""

    def __init__(
        self, *, on_change: Callable[[list[AdapterEntry]], None], limit_s: float = COMMAND_LIMIT_S
    ) -> None:
        """`on_change` is called with the entries of the list that have changed. `limit_s` is the
        time limit of a command in seconds."""
        self.list = AdapterList()
        """The adapters that requests may use in addition to the adapters that the workers have from
        the start."""
        self._on_change = on_change
        self._limit_s = limit_s
        self._shared = SharedAdapters()
        self._wake: Callable[[], None] = lambda: None
        self._waiting: dict[WantedLoad, asyncio.TimerHandle] = {}
        self._pipeline = scheduler_pb2.PipelineDescription()

    def serve(self, shared: SharedAdapters, wake: Callable[[], None]) -> None:
        """Passes loads to the pipelines that share `shared` from now on. `wake` makes these
        pipelines look for loads."""
        self._shared, self._wake = shared, wake
        shared.sources = self.list

    def note_pipeline(self, pipeline: scheduler_pb2.PipelineDescription) -> None:
        """Notes the description of the pipeline that serves. It names the adapters that the workers
        have from the start, and says whether they load others."""
        self._pipeline = pipeline

    def merge(self, entries: Iterable[AdapterEntry]) -> None:
        """Takes over the newer entries of a frontend's list of adapters. Entries that are not valid
        are left out."""
        if changed := self.list.merge(filter(_is_sound, entries)):
            self._on_change(changed)
            self._wake()

    def carry_out(self, command: scheduler_pb2.AdapterCommand, on_answer: OnAnswer) -> None:
        """Begins to carry out a command, and calls `on_answer` once, now or later."""
        if command.source:
            self._load(command.name, command.source, on_answer)
        else:
            self._unload(command.name, on_answer)

    def close(self) -> None:
        """Gives up the commands in progress, because this scheduler does not lead any more."""
        for wanted in list(self._waiting):
            self._give_up(wanted)

    def _load(self, name: str, source: str, on_answer: OnAnswer) -> None:
        refusal = self._refusal(name, source)
        if refusal is not None:
            on_answer(refusal)
            return
        wanted = WantedLoad(name, source, lambda digest, failure: None)
        wanted.on_end = partial(self._note_end, wanted, on_answer)
        loop = asyncio.get_running_loop()
        self._waiting[wanted] = loop.call_later(self._limit_s, self._give_up, wanted)
        self._shared.want(wanted)
        self._wake()

    def _refusal(self, name: str, source: str) -> Answer | None:
        """Returns an answer with the reason why an adapter must not be loaded. Returns None if it
        may be loaded."""
        try:
            check_name(name)
        except ValueError as error:
            return _invalid("lora_name", str(error))
        try:
            check_form(source)
        except SourceRefused as error:
            return _invalid("lora_path", str(error))
        if not self._pipeline.model:
            return Answer(AdapterOutcome.ADAPTER_OUTCOME_UNAVAILABLE, "no pipeline at the moment")
        if not max_loaded_in(self._pipeline.traits):
            return _invalid(
                "lora_name", "the workers load no adapters: allowed_adapter_sources is empty"
            )
        is_taken = self.list.get(name) is not None or name in adapters_in(self._pipeline.traits)
        if is_taken or name == self._pipeline.model:
            return _invalid(
                "lora_name", "is the name of another adapter or of the model; unload it first"
            )
        if any(one.name == name for one in self._waiting):
            return _invalid("lora_name", "is being loaded")
        if self.list.is_full or len(self._waiting) >= MAX_COMMANDS:
            return Answer(
                AdapterOutcome.ADAPTER_OUTCOME_FULL,
                "there are too many adapters, or too many are being loaded",
            )
        return None

    def _note_end(self, wanted: WantedLoad, on_answer: OnAnswer, digest: str, failure: str) -> None:
        self._waiting.pop(wanted).cancel()
        if wanted in self._shared.wanted:
            self._shared.wanted.remove(wanted)
        if digest and self.list.get(wanted.name) is None:
            self._on_change([self.list.put(wanted.name, wanted.source, digest)])
            log.info("adapter %s is loaded from %s: %s", wanted.name, wanted.source, digest)
            on_answer(_DONE)
        elif digest:
            on_answer(_invalid("lora_name", "is the name of another adapter"))
        elif failure:
            on_answer(_invalid("lora_path", failure))
        else:
            on_answer(
                Answer(
                    AdapterOutcome.ADAPTER_OUTCOME_UNAVAILABLE, "no pipeline has loaded it in time"
                )
            )

    def _give_up(self, wanted: WantedLoad) -> None:
        wanted.on_end("", "")

    def _unload(self, name: str, on_answer: OnAnswer) -> None:
        if name in adapters_in(self._pipeline.traits):
            on_answer(_invalid("lora_name", "is there from the start; workers without it drop it"))
            return
        removed = self.list.remove(name)
        if removed is None:
            on_answer(
                Answer(
                    AdapterOutcome.ADAPTER_OUTCOME_UNKNOWN, "there is no such adapter", "lora_name"
                )
            )
            return
        log.info("adapter %s is unloaded", name)
        self._on_change([removed])
        on_answer(_DONE)
        self._wake()


def _is_sound(entry: AdapterEntry) -> bool:
    try:
        check_name(entry.name)
        if not entry.is_removed:
            check_form(entry.source)
    except ValueError:
        return False
    return entry.version < MAX_VERSION and len(entry.digest) <= MAX_DIGEST_LENGTH


def _invalid(field: str, message: str) -> Answer:
    return Answer(AdapterOutcome.ADAPTER_OUTCOME_INVALID, message, field)
