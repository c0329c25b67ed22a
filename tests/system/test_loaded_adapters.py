"""A system whose clients load and unload adapters while it runs: the tokens are those of merged
models, in any company and through the deaths of a rank and of a scheduler."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.adapters import merge, write_adapter
from tests.checkpoints import Oracle
from tests.system.conftest import tokens
from tests.system.stack import START_TIMEOUT_S, Stack, serving

pytestmark = pytest.mark.thorough

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
N_ADAPTERS = 4
N_STREAMS = 12


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, sizes = tmp_path_factory.mktemp("adapters"), Oracle(model).model
    return {
        f"a{i}": write_adapter(directory / str(i), sizes, TARGETS, rank=4 << i, seed=i)
        for i in range(N_ADAPTERS)
    }


@pytest.fixture(
    scope="module", params=[{"stages": 2}, {"pipelines": 2}], ids=["stages", "pipelines"]
)
def layout(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def stack(model: Path, adapters: dict[str, Path], layout: dict[str, Any]) -> Iterator[Stack]:
    with serving(
        model,
        allowed_adapter_sources=str(adapters["a0"].parent),
        max_loaded_adapters=2,
        dtype="float32",
        spares=1,
        fail_fast=False,
        **layout,
    ) as stack:
        yield stack


def load(stack: Stack, name: str, path: Path, **fields: Any) -> None:
    response = stack.post(
        "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields}
    )
    assert response.status_code == 200, response.text


def names(stack: Stack) -> dict[str, str]:
    response = httpx.get(f"{stack.http}/v1/models")
    return {one["id"]: one.get("parent", "") for one in response.json()["data"]}


def calls() -> list[dict[str, Any]]:
    source = Random(5)
    return [
        {
            "model": ["", "a0", "a1", "a2", "a3"][index % 5],
            "prompt": tokens(source, 40),
            "max_tokens": 40,
            "temperature": index % 3 / 2,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(N_STREAMS)
    ]


def answers(stack: Stack) -> list[list[int]]:
    with ThreadPoolExecutor(N_STREAMS) as pool:
        return list(pool.map(lambda call: answer(stack, call), calls()))


def answer(stack: Stack, call: dict[str, Any]) -> list[int]:
    """The tokens of an answer, which may wait for processes that start again."""
    body = {**call, "return_token_ids": True}
    response = stack.post("/v1/completions", body, timeout_s=START_TIMEOUT_S)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def test_adapters_are_loaded_evicted_and_unloaded(
    stack: Stack, model: Path, adapters: dict[str, Path]
) -> None:
    for name, path in adapters.items():
        load(stack, name, path)
    assert [name for name, parent in names(stack).items() if parent] == list(adapters)
    prompt = tokens(Random(1), 30)
    for name, path in adapters.items():
        oracle = Oracle(model)
        merge(oracle.model, path)
        own = stack.complete(prompt, model=name, max_tokens=12, temperature=0)["token_ids"]
        assert own == oracle.generate(prompt, 12, guess=own)
    alone = [stack.complete(**call)["token_ids"] for call in calls()]
    assert answers(stack) == alone  # four adapters take turns in two places
    for module in ("services.worker.rank", "services.scheduler"):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answers, stack)
            stack.kill(module)
            assert running.result() == alone
        stack.look_at_tree()
    broken = adapters["a0"].parent / "broken"
    broken.mkdir(exist_ok=True)

    for path, said in (
        (broken, "adapter_config.json does not exist"),
        (model, "is not below a directory"),
    ):
        refused = stack.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
        assert refused.status_code == 400
        assert said in refused.text
        assert str(path) not in refused.text

    assert stack.post("/v1/unload_lora_adapter", {"lora_name": "a3"}).status_code == 200
    assert "a3" not in names(stack)
    response = stack.post("/v1/completions", {"model": "a3", "prompt": prompt})
    assert response.status_code == 404


def test_a_file_that_changes_never_gives_tokens(
    stack: Stack, model: Path, adapters: dict[str, Path], layout: dict[str, Any]
) -> None:
    if "pipelines" in layout:
        pytest.skip("either pipeline may still hold the first version")
    changing = adapters["a0"].parent / "changing"
    write_adapter(changing, Oracle(model).model, TARGETS, seed=99)
    load(stack, "changing", changing)
    shutil.copytree(adapters["a1"], changing, dirs_exist_ok=True)
    prompt = tokens(Random(1), 30)
    for name in ("a1", "a2"):  # they take its place in memory
        assert stack.complete(prompt, model=name, max_tokens=2)["token_ids"]
    call = {"model": "changing", "prompt": prompt, "max_tokens": 2}
    response = stack.post("/v1/completions", call)
    assert response.status_code == 500
    assert "loaded first" in response.text
    assert stack.complete(prompt, model="a1", max_tokens=2)["token_ids"]
