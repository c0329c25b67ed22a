"""Receipts of a real system, by all protocols, are verified by computing their answers again."""

import functools
import json
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from orcinus.v1 import inference_pb2, sampling_pb2

from services.cli.verify import UNCHECKED, main
from services.receipts.keys import SigningKeys, new_key
from tests.system.conftest import tokens
from tests.system.stack import Stack, serving

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, None]}}, "required": ["a"]}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "n": 2, "temperature": 1.0, "seed": 11}),
    ("/v1/completions", {"prompt": [9, 8, 7], "bad_words": ["a"], "logit_bias": {"50": 3}}),
    ("/v1/completions", {"prompt": "hello", "temperature": 0, "min_tokens": 3, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 60, "regex": "(ab|c){2,5}-[0-9]{3}"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True}),
    (
        "/v1/completions",
        {"prompt": "x", "ignore_eos": True, "max_tokens": 40, "logprobs": 2, "seed": 3},
    ),
    ("/v1/chat/completions", {**CHAT, "frequency_penalty": 0.5, "seed": -(2**63)}),
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    ),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 9}),
    ("/v1/messages", CHAT),
]


@pytest.fixture(scope="module")
def saved(one_stage: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of the system to requests of all protocols at once, one file for each."""
    directory = tmp_path_factory.mktemp("answers")

    def save(number: int, is_streamed: bool) -> None:
        path, body = PATHS[number]
        response = one_stage.post(path, {**body, "receipt": True, "stream": is_streamed})
        assert response.status_code == 200, response.text
        (directory / f"{number}-{is_streamed}").write_text(response.text)

    def save_grpc() -> None:
        prompt = inference_pb2.Prompt(text="hello")
        options = inference_pb2.GenerationOptions(receipt=True, max_tokens=9)
        options.sampling.temperature = 0.3
        with one_stage.inference() as stub:
            answer = stub.Generate(inference_pb2.GenerateRequest(prompt=prompt, options=options))
        (directory / "grpc").write_text(json.dumps({"receipt": answer.choices[0].receipt}))

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(save, it, flag) for it in range(len(PATHS)) for flag in (False, True)]
        for job in (*jobs, pool.submit(save_grpc)):
            job.result()
    text = one_stage.complete("hello", temperature=0, max_tokens=20)["text"]
    stopped = {"prompt": "hello", "temperature": 0, "max_tokens": 20, "stop": [text[4:6]]}
    answer = one_stage.post("/v1/completions", {**stopped, "receipt": True}).json()
    assert answer["choices"][0]["receipt"]["finish"] == "stop_text"
    (directory / "stopped").write_text(json.dumps(answer))
    return directory


def verified(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Iterator[Any]]:
    status = main([*map(str, arguments), "--json"])
    return status, map(json.loads, capsys.readouterr().out.splitlines())


def test_answers_of_all_protocols_come_again(
    one_stage: Stack, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(saved.iterdir())
    where = f"--grpc={one_stage.grpc}"
    status, verdicts = verified(capsys, *files, where, "--keys", one_stage.http)
    said = list(verdicts)
    assert [it for it in said if (it["outcome"], it["signature"]) != ("same", "valid")] == []
    assert (status, len(said)) == (0, 2 * (len(PATHS) + 1) + 2)


def test_what_was_changed_or_signed_by_others_is_found(
    one_stage: Stack, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = json.loads((saved / "5-False").read_text())["choices"][0]["receipt"]
    other_key = SigningKeys.parse(new_key())
    changed = json.loads(json.dumps(receipt))
    changed["tokens"][7] = (changed["tokens"][7] + 1) % 300
    other_weights = {**receipt, "model": {**receipt["model"], "weights": "0" * 64}}
    stopped = json.loads((saved / "stopped").read_text())["choices"][0]["receipt"]
    cut = {**receipt, "tokens": receipt["tokens"][:3], "finish": "stop_text"}
    cut["options"] = {**receipt["options"], "stop": stopped["options"]["stop"]}
    file = tmp_path / "receipts.jsonl"
    forms = [receipt, changed, other_key.signed(receipt), other_weights, cut]
    file.write_text("\n".join(map(json.dumps, forms)))
    where = f"--grpc={one_stage.grpc}"
    status, verdicts = verified(capsys, file, where, "--keys", one_stage.http)
    said = list(verdicts)
    assert [(it["outcome"], it["signature"]) for it in said] == [
        ("same", "valid"),
        ("differs", "wrong"),
        ("same", "wrong"),
        ("unchecked", "wrong"),
        ("differs", "wrong"),
    ]
    assert (status, said[1]["at"]) == (1, 7)
    assert isinstance(said[1]["logit_gap"], float)
    assert "weights" in said[3]["why"]
    file.write_text(json.dumps(other_weights))
    assert verified(capsys, file, where)[0] == UNCHECKED


@pytest.mark.parametrize(
    "path",
    [
        ("prompt", "tokens", 0),
        ("seed",),
        ("options", "sampling", "temperature"),
        ("options", "sampling", "min_p"),
        ("options", "sampling", "repetition_penalty"),
        ("options", "max_tokens"),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_computing_finds_what_was_changed_before_a_receipt_was_signed(
    one_stage: Stack,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: tuple[str | int, ...],
) -> None:
    receipt = json.loads((saved / "5-False").read_text())["choices"][0]["receipt"]
    del receipt["signature"]
    *steps, name = path
    holder = functools.reduce(operator.getitem, steps, receipt)
    holder[name] = str(int(holder[name]) + 1) if name == "seed" else holder[name] + 1
    file, keys = tmp_path / "receipt.json", tmp_path / "keys.pem"
    keys.write_bytes(new_key())
    file.write_text(json.dumps(SigningKeys.parse(keys.read_bytes()).signed(receipt)))
    status, verdicts = verified(capsys, file, f"--grpc={one_stage.grpc}", "--keys", keys)
    assert [(it["outcome"], it["signature"]) for it in verdicts] == [("differs", "valid")]
    assert status == 1


@pytest.mark.thorough
def test_receipts_of_one_system_are_verified_by_another(
    one_stage: Stack, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(5)
    file = tmp_path / "receipts.jsonl"
    bodies = [
        {"prompt": tokens(random, 60), "max_tokens": random.randint(1, 40), "seed": number}
        for number in range(200)
    ]
    with ThreadPoolExecutor(32) as pool:
        choices = pool.map(lambda body: one_stage.complete(**body, receipt=True), bodies)
        file.write_text("\n".join(json.dumps(choice["receipt"]) for choice in choices))
    status, verdicts = verified(
        capsys,
        file,
        f"--model={model}",
        "--keys",
        one_stage.http,
        "--kv-memory=16MiB",
        "--stages=2",
    )
    assert [it for it in verdicts if it["outcome"] != "same"] == []
    assert status == 0


@pytest.mark.thorough
def test_answers_that_survived_deaths_have_receipts_like_any_others(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, file = tmp_path / "keys.pem", tmp_path / "receipts.jsonl"
    keys.write_bytes(new_key())
    options: dict[str, Any] = {"receipts": "always", "receipt_keys_file": keys, "fail_fast": False}
    with serving(model, stages=2, **options) as stack, stack.inference() as stub:
        prompt = inference_pb2.Prompt(text="hello")
        calls = [
            stub.GenerateStream(
                inference_pb2.GenerateStreamRequest(
                    prompt=prompt,
                    options=inference_pb2.GenerationOptions(
                        max_tokens=300,
                        ignore_eos=True,
                        return_token_ids=True,
                        sampling=sampling_pb2.SamplingParams(seed=seed),
                    ),
                )
            )
            for seed in range(8)
        ]
        begun = [next(call) for call in calls]
        stack.kill("services.worker", 1)
        stack.kill("services.scheduler")
        receipts = [piece.choice.receipt for call in calls for piece in call]
        file.write_text("\n".join(filter(None, receipts)))
        assert len(begun) == len(list(filter(None, receipts)))
        status, verdicts = verified(capsys, file, f"--grpc={stack.grpc}", "--keys", stack.http)
        assert [it for it in verdicts if it["outcome"] != "same"] == []
        assert status == 0
    for line in file.read_text().splitlines():
        receipt = json.loads(line)
        assert (len(receipt["tokens"]), receipt["n_given"]) == (300, 0)
        assert len(receipt["arithmetic"]) == 1
