"""Loads adapters in a separate thread, while the rank runs iterations.

An adapter comes from a directory that the settings allow. The thread reads the adapter's files,
compares its tokenizer and chat template with the model's, and packs this rank's share of its
matrices. One adapter is loaded at a time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from orcinus.v1 import worker_pb2

from services.common.adapter_sources import SourceRefused, check_inside, directory_of
from services.common.failure_text import failure_text
from services.worker.models.adapters.adaptable_program import AdaptableProgram, FittedAdapter
from services.worker.models.adapters.adapter import HeldAdapter
from services.worker.models.adapters.adapter_config import AdapterError, parse_lora_config
from services.worker.models.adapters.adapter_files import AdapterFiles
from services.worker.models.adapters.text_files import check_text_files
from services.worker.settings import RankSettings

log = logging.getLogger(__name__)

MAX_ENTRIES = 1000
"""Largest number of entries of an adapter's directory."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The result of loading an adapter."""

    load_id: int
    fitted: FittedAdapter | None  # None: the load has failed
    failure: str = ""
    """Reason why the load has failed, as a short printable text for clients, or an empty text. It
    may name files, but no directories."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "failure", failure_text(self.failure))


OnEnd = Callable[[LoadEnd], None]
"""A function that is called once with the result of a load. It must be safe to call in the loader's
thread."""


class AdapterLoader:
    """Loads adapters for all epochs of a rank, in the order in which loads begin."""

    def __init__(self, settings: RankSettings, program: AdaptableProgram) -> None:
        """The thread starts with the first load. `program` is the program of the rank's stage."""
        self._settings = settings
        self._program = program
        self._waiting: queue.SimpleQueue[tuple[worker_pb2.AdapterOrder, int, OnEnd]]
        self._waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def max_loaded(self) -> int:
        """Largest number of adapters that are loaded, or being loaded, at a time."""
        return self._settings.n_loaded_adapters

    def begin(self, order: worker_pb2.AdapterOrder, index: int, on_end: OnEnd) -> None:
        """Begins to load the adapter that `order` names. `index` is the number by which batches
        will refer to the adapter. `on_end` is called when the load has ended, or at once if too
        many earlier loads are waiting."""
        if self._waiting.qsize() >= self.max_loaded:  # an earlier load hangs
            on_end(LoadEnd(order.load_id, None, "earlier loads have not ended"))
            return
        self._waiting.put((order, index, on_end))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="adapters", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        with torch.inference_mode():
            while True:
                order, index, on_end = self._waiting.get()
                on_end(self._load(order, index))

    def _load(self, order: worker_pb2.AdapterOrder, index: int) -> LoadEnd:
        try:
            return LoadEnd(order.load_id, self._fitted(order, index))
        except (AdapterError, SourceRefused) as error:
            failure = str(error)
        except OSError as error:
            log.warning("adapter %s: %s", order.name, error)
            failure = error.strerror or "it cannot be read"
        except (MemoryError, torch.OutOfMemoryError):
            failure = "there is too little memory for it"
        except Exception:  # the thread goes on: without it, the rank could load nothing more
            log.exception("adapter %s is not loaded", order.name)
            return LoadEnd(order.load_id, None, "internal error of a worker, see its log")
        end = LoadEnd(order.load_id, None, failure)
        log.warning("adapter %s is not loaded: %s", order.name, end.failure)
        return end

    def _fitted(self, order: worker_pb2.AdapterOrder, index: int) -> FittedAdapter:
        directory = self._directory(order.source)
        check_text_files(order.name, directory, self._settings.model)
        adapter = HeldAdapter(order.name, directory, self._read)
        if order.digest not in ("", adapter.digest):
            raise adapter.error("is not the file that was loaded first; load it under another name")
        return self._program.fit(adapter, index)

    def _read(self, directory: Path) -> AdapterFiles:
        return AdapterFiles.read(
            directory,
            lambda path: check_inside(path, self._settings.allowed_adapter_sources),
            lambda config: self._program.max_weights_bytes(parse_lora_config(config)),
        )

    def _directory(self, source: str) -> Path:
        """Returns the directory of a source. Raises SourceRefused if the settings do not allow the
        directory or a file to which one of its entries links, if there is no such directory, or if
        the directory has more than MAX_ENTRIES entries."""
        prefixes = self._settings.allowed_adapter_sources
        directory = directory_of(source, prefixes)
        if not directory.is_dir():
            raise SourceRefused("is no directory of this worker")
        for number, path in enumerate(directory.iterdir()):
            if number == MAX_ENTRIES:
                raise SourceRefused(f"has more than {MAX_ENTRIES} entries")
            check_inside(path, prefixes)
        return directory


class NoLoader:
    """Replacement for `AdapterLoader` if the settings allow no loading."""

    max_loaded = 0

    def begin(self, order: worker_pb2.AdapterOrder, index: int, on_end: OnEnd) -> None:
        """Refuses the load."""
        on_end(LoadEnd(order.load_id, None, "the workers load no adapters"))


NO_LOADER = NoLoader()
