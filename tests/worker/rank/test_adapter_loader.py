"""The adapters that a rank loads, their directories, and the failures of other loads."""

import json
import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from orcinus.v1 import worker_pb2

from services.common.failure_text import MAX_FAILURE_LENGTH
from services.worker.models.adapters.adaptable_program import FittedAdapter
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.adapters.adapter_config import MAX_RANK, LoraConfig, parse_lora_config
from services.worker.models.adapters.weights_header import MAX_HEADER_BYTES
from services.worker.rank.adapter_loader import MAX_ENTRIES, AdapterLoader, LoadEnd
from services.worker.settings import PipelinePlace, WorkerSettings
from tests.adapters import sizes_of, write_adapter
from tests.checkpoints import Oracle, write_family_checkpoint
from tests.limits import HANG_S
from tests.worker.models.adapters.test_adapted_model import FAMILIES
from tests.worker.pipeline import load

TARGETS = ("q_proj", "v_proj")


class Site:
    """A rank's loader over a model, and a directory for adapters."""

    def __init__(self, directory: Path) -> None:
        self.model, self.allowed = directory / "model", directory / "adapters"
        write_family_checkpoint(self.model, FAMILIES["llama"][0])
        self.allowed.mkdir()
        self.sizes = sizes_of(Oracle(self.model).model)
        settings = WorkerSettings(
            model=self.model, allowed_adapter_sources=(str(self.allowed),), max_loaded_adapters=2
        )
        self.settings = settings.for_rank(0).at(PipelinePlace(0, 1))
        program = load(self.model, dtype="float32", takes_adapters=True).adaptable
        assert program is not None
        self.loader = AdapterLoader(self.settings, program)
        self.ends: queue.SimpleQueue[LoadEnd] = queue.SimpleQueue()

    def write(self, name: str = "law", **config: Any) -> Path:
        return write_adapter(self.allowed / name, self.sizes, TARGETS, **config)

    def load(self, source: Path | str, digest: str = "") -> LoadEnd:
        order = worker_pb2.AdapterOrder(load_id=1, name="law", source=str(source), digest=digest)
        self.loader.begin(order, 0, self.ends.put)
        return self.ends.get(timeout=HANG_S)

    def failure(self, source: Path | str, **options: str) -> str:
        """Why a load fails. No message may say where files are."""
        end = self.load(source, **options)
        assert end.fitted is None
        assert "/" not in end.failure.replace("'/'", ""), end.failure
        return end.failure


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("loader"))


@pytest.fixture
def site(module_site: Site) -> Site:
    for path in sorted(module_site.allowed.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return module_site


def test_an_allowed_adapter_is_loaded_with_its_digest(site: Site) -> None:
    end = site.load(site.write())
    assert end.fitted is not None
    again = site.load(site.allowed / "law", end.fitted.digest)
    assert again.fitted is not None
    assert again.fitted.digest == end.fitted.digest


def test_files_that_have_changed_are_refused(site: Site) -> None:
    first = site.load(site.write()).fitted
    assert first is not None
    site.write(seed=1)
    assert "not the file that was loaded first" in site.failure(
        site.allowed / "law", digest=first.digest
    )


def test_other_directories_are_refused(site: Site, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", site.sizes, TARGETS)
    (site.allowed / "link").symlink_to(other)
    for source in (other, site.allowed / "link", site.allowed / ".." / "model"):
        assert "is not below" in site.failure(source)
    assert "no directory" in site.failure(site.allowed / "none")
    assert "hub" in site.failure("acme-law")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"]
)
def test_a_file_elsewhere_is_not_read(site: Site, tmp_path: Path, name: str) -> None:
    own, other = site.write(), write_adapter(tmp_path, site.sizes, TARGETS)
    (own / name).unlink(missing_ok=True)
    (own / name).symlink_to(other / name)
    assert "is not below" in site.failure(own)


def test_broken_adapters_say_what_is_wrong_and_not_where(site: Site) -> None:
    for name, content, said in (
        ("adapter_model.safetensors", b"none", "adapter_model.safetensors: cannot be read"),
        ("adapter_config.json", b"[", "adapter_config.json is not JSON"),
        ("adapter_config.json", json.dumps({"peft_type": "IA3"}).encode(), "peft_type"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
    ):
        own = site.write("broken")
        (own / name).write_bytes(content)
        assert said in site.failure(own)
        (own / name).unlink()
    own = site.write("other", rank=2)
    (own / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors does not exist" in site.failure(own)
    os.mkfifo(own / "adapter_model.safetensors")
    assert "no regular file" in site.failure(own)  # without waiting for a writer


def test_adapters_of_another_model_are_refused(site: Site) -> None:
    own = write_adapter(site.allowed / "law", {"model.layers.0.self_attn.q_proj": (5, 7)}, TARGETS)
    assert "has 7 inputs and 5 outputs" in site.failure(own)


def test_a_file_that_is_too_large_for_the_model_is_not_read(site: Site) -> None:
    own = site.write()
    os.truncate(own / "adapter_model.safetensors", 64 << 20)
    assert "adapter_model.safetensors has more than" in site.failure(own)


@pytest.mark.parametrize("rank", [1, MAX_RANK])
def test_an_adapter_of_all_layers_in_the_largest_type_is_not_too_large(
    site: Site, rank: int
) -> None:
    every = tuple({name.rsplit(".", 1)[-1] for name in site.sizes})
    own = site.write(rank=rank, dtype=torch.float64)
    assert site.load(own).fitted is not None
    program = load(site.model, n_stages=2, dtype="float32", takes_adapters=True).adaptable
    assert program is not None
    own = write_adapter(site.allowed / "all", site.sizes, every, rank=rank, dtype=torch.float64)
    config = parse_lora_config((own / "adapter_config.json").read_bytes())
    n_bytes = (own / "adapter_model.safetensors").stat().st_size
    assert n_bytes <= program.max_weights_bytes(config) - MAX_HEADER_BYTES + 10_000


def test_a_directory_has_a_bounded_number_of_entries(site: Site) -> None:
    own = site.write()
    for number in range(MAX_ENTRIES):
        (own / f"x{number}").touch()
    assert "entries" in site.failure(own)


def test_a_link_that_leads_to_itself_ends_its_own_load_only(site: Site) -> None:
    own = site.write()
    for name in ("adapter_config.json", "tokenizer.json"):
        link = own / name
        link.unlink(missing_ok=True)
        link.symlink_to(link)
    assert "adapter_config.json cannot be read" in site.failure(own)
    loop = site.allowed / "loop"
    loop.symlink_to(loop)
    assert "no directory" in site.failure(loop)
    assert site.load(site.write("good")).fitted is not None


@pytest.mark.parametrize("key", ["\\ud800", "x\\n", "x" * 4_000_000], ids=["half", "line", "long"])
def test_any_text_in_the_files_gives_a_failure_that_can_be_sent(site: Site, key: str) -> None:
    own = site.write()
    (own / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "{key}": 1}}')
    failure = site.failure(own)
    assert "adapter_config.json" in failure
    assert failure.isprintable()
    assert len(worker_pb2.AdapterReport(failure=failure).failure) <= MAX_FAILURE_LENGTH


def test_an_error_that_nobody_expects_ends_its_own_load_only(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        """A program with a bug."""

        def __init__(self) -> None:
            self.is_broken = True

        def max_weights_bytes(self, config: LoraConfig) -> int:
            return 1 << 20

        def fit(self, adapter: Adapter, index: int) -> FittedAdapter:
            if self.is_broken:
                raise RuntimeError("a secret of the worker")
            return FittedAdapter(adapter.digest, index, {})

    program = Broken()
    loader = AdapterLoader(site.settings, program)  # type: ignore[arg-type]
    order = worker_pb2.AdapterOrder(load_id=1, name="law", source=str(site.write()))
    loader.begin(order, 0, site.ends.put)
    end = site.ends.get(timeout=HANG_S)
    assert end.fitted is None
    assert "internal error" in end.failure
    assert "secret" not in end.failure
    assert "Traceback" in caplog.text
    program.is_broken = False
    loader.begin(order, 0, site.ends.put)
    assert site.ends.get(timeout=HANG_S).fitted is not None


def test_loads_that_wait_behind_one_that_hangs_are_bounded(site: Site) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Hanging:
        """A program whose disk does not answer."""

        def max_weights_bytes(self, config: LoraConfig) -> int:
            return 1 << 20

        def fit(self, adapter: Adapter, index: int) -> FittedAdapter:
            has_begun.set()
            may_end.wait(HANG_S)
            return FittedAdapter(adapter.digest, index, {})

    loader = AdapterLoader(site.settings, Hanging())  # type: ignore[arg-type]
    order = worker_pb2.AdapterOrder(load_id=1, name="law", source=str(site.write()))
    loader.begin(order, 0, site.ends.put)
    assert has_begun.wait(HANG_S)
    for _ in range(3):
        loader.begin(order, 0, site.ends.put)
    assert site.ends.get(timeout=HANG_S).failure == "earlier loads have not ended"
    assert site.ends.empty()
    may_end.set()
    for _ in range(3):
        assert site.ends.get(timeout=HANG_S).fitted is not None
