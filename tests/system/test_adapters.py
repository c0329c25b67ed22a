"""A system with adapters: the tokens are those of merged models, in any company and through the
death of a rank, and receipts of adapters are verified."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.cli.verify import UNCHECKED, main
from services.receipts.keys import new_key
from tests.adapters import merge, write_adapter
from tests.checkpoints import Oracle
from tests.system.conftest import tokens
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "org/attention": ("q_proj", "v_proj"),
    "head": ("lm_head",),
}
N_STREAMS = 12


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, sizes = tmp_path_factory.mktemp("adapters"), Oracle(model).model
    return {
        name: write_adapter(directory / str(i), sizes, targets, rank=4 << i, seed=i)
        for i, (name, targets) in enumerate(TARGETS.items())
    }


@pytest.fixture(
    scope="module",
    params=[{"stages": 2}, {"pipelines": 2}, {"tp": 2}],
    ids=["stages", "pipelines", "ranks"],
)
def stack(
    model: Path,
    adapters: dict[str, Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    keys = tmp_path_factory.mktemp("keys") / "keys.pem"
    keys.write_bytes(new_key())
    with serving(
        model,
        adapters=",".join(f"{name}={path}" for name, path in adapters.items()),
        dtype="float32",
        spares=1,
        fail_fast=False,
        receipts="on_request",
        receipt_keys_file=keys,
        **request.param,
    ) as stack:
        yield stack


def calls() -> list[dict[str, Any]]:
    source = Random(5)
    shared = tokens(source, 40)
    names = ["", *TARGETS]
    return [
        {
            "model": names[index % len(names)],
            "prompt": shared if index < 8 else tokens(source, 40),
            "max_tokens": 60,
            "temperature": index % 3 / 2,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(N_STREAMS)
    ]


def answers(stack: Stack) -> list[list[int]]:
    with ThreadPoolExecutor(N_STREAMS) as pool:
        return list(pool.map(lambda call: stack.complete(**call)["token_ids"], calls()))


def test_greedy_tokens_are_those_of_the_merged_model(
    stack: Stack, model: Path, adapters: dict[str, Path]
) -> None:
    prompt = tokens(Random(1), 30)
    told = set()
    for name, path in adapters.items():
        oracle = Oracle(model)
        merge(oracle.model, path)
        own = stack.complete(prompt, model=name, max_tokens=12, temperature=0)["token_ids"]
        assert own == oracle.generate(prompt, 12, guess=own)
        told.add(tuple(own))
    assert len(told) == len(adapters)


def test_tokens_are_the_same_alone_in_company_and_after_a_death(stack: Stack) -> None:
    alone = [stack.complete(**call)["token_ids"] for call in calls()]
    assert answers(stack) == alone
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answers, stack)
        stack.kill("services.worker.rank")
        assert running.result() == alone
    stack.look_at_tree()


def test_receipts_of_adapters_are_verified(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for index, call in enumerate(calls()[:4]):
        answer = stack.post("/v1/completions", {**call, "receipt": True}).json()
        files.append(tmp_path / str(index))
        files[-1].write_text(json.dumps(answer))
    assert main([*map(str, files), "--grpc", stack.grpc]) == 0
    answer["choices"][0]["receipt"]["model"]["adapter"]["digest"] = "0" * 64
    files[-1].write_text(json.dumps(answer))
    assert main([str(files[-1]), "--grpc", stack.grpc, "--json"]) == UNCHECKED
    assert "another one here" in capsys.readouterr().out
