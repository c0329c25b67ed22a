"""The demo model as a user meets it: examples, the official client, plain gRPC, wrong input."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from orcinus.v1 import inference_pb2

from tests.generation_options import generation_options
from tests.limits import HANG_S
from tests.system.stack import ROOT, Stack, serving

DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module")
def demo() -> Iterator[Stack]:
    """A stack as `make run` serves it, with room for few requests, that also makes vectors."""
    with serving(DEMO, max_requests=3, pooling="mean") as stack:
        yield stack


@pytest.fixture(scope="module")
def client(demo: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_gets_vectors(client: openai.OpenAI) -> None:
    texts, model = ["hello", "copy a file"], "demo"
    packed = client.embeddings.create(model=model, input=texts)  # in base64, by default
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=model, input=["good", ""])
    assert caught.value.param == "input[1]"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["openai_client.py", "grpc_client.py"])
def test_the_examples_work(demo: Stack, name: str) -> None:
    address = f"{demo.http}/v1" if "openai" in name else demo.grpc
    result = subprocess.run(
        [sys.executable, Path("examples") / name, address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout


def test_the_ready_line_offers_a_command_that_works(demo: Stack) -> None:
    [command] = [line for line in demo.output if line.startswith("Try: ")]
    result = subprocess.run(
        command.removeprefix("Try: "), shell=True, capture_output=True, text=True, check=True
    )
    assert '"chat.completion"' in result.stdout


def test_the_demo_model_writes_english_that_ends(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="demo", prompt="If the file does not exist,", max_tokens=60, temperature=0
    )
    words = {"the", "a", "is", "of", "to", "return", "raise", "file", "be", "not", "and", "if"}
    assert len(words & set(text.choices[0].text.lower().split())) >= 3
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=60, temperature=0
    )
    assert chat.choices[0].finish_reason == "stop"
    assert chat.choices[0].message.content


def test_streamed_pieces_are_the_whole_over_both_protocols(
    demo: Stack, client: openai.OpenAI
) -> None:
    prompt, seed = "Return the", 11
    whole = client.completions.create(model="demo", prompt=prompt, max_tokens=40, seed=seed)
    pieces = client.completions.create(
        model="demo", prompt=prompt, max_tokens=40, seed=seed, stream=True
    )
    text = "".join(piece.choices[0].text for piece in pieces)
    assert text == whole.choices[0].text
    with demo.inference() as stub:
        request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(text=prompt),
            options=generation_options(max_tokens=40, seed=seed),
        )
        messages = list(stub.GenerateStream(request, timeout=HANG_S))
    assert "".join(message.choice.text for message in messages) == text
    assert messages[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_penalties_change_what_is_written_over_both_protocols(
    demo: Stack, client: openai.OpenAI
) -> None:
    def most_repeated(**options: Any) -> tuple[int, str]:
        """Returns how often the most frequent token of a greedy answer occurs."""
        text = client.completions.create(
            model="demo",
            prompt="the file the file the file",
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **options,
        )
        token_ids = text.choices[0].model_dump()["token_ids"]
        return max(map(token_ids.count, token_ids)), text.choices[0].text

    without, _ = most_repeated()
    with_penalty, text = most_repeated(frequency_penalty=2)
    assert with_penalty < without / 2
    with demo.inference() as stub:
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(text="the file the file the file"),
            options=generation_options(
                max_tokens=60, temperature=0, ignore_eos=True, frequency_penalty=2
            ),
        )
        assert stub.Generate(request, timeout=HANG_S).choices[0].text == text


WRONG = {
    "no prompt": ({}, "prompt"),
    "an empty prompt": ({"prompt": []}, "prompt"),
    "a token that is none": ({"prompt": [4096]}, "prompt"),
    "a prompt that is too long": ({"prompt": [5] * 1024}, "prompt"),
    "negative max_tokens": ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    "bad temperature": ({"prompt": "x", "temperature": 9.5}, "temperature"),
    "bad frequency_penalty": ({"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
    "bad repetition_penalty": ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    "unknown model": ({"prompt": "x", "model": "other"}, "model"),
}


@pytest.mark.parametrize(("body", "field"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_by_the_name_of_the_field(
    demo: Stack, body: dict[str, Any], field: str
) -> None:
    response = demo.post("/v1/completions", {"model": "demo", **body})
    assert response.status_code == (404 if field == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', 400),
        (b"{", 400),
        (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', 413),
    ],
    ids=["broken UTF-8", "broken JSON", "50 MB"],
)
def test_a_body_that_cannot_be_read_is_refused(demo: Stack, content: bytes, status: int) -> None:
    response = httpx.post(f"{demo.http}/v1/completions", content=content, timeout=HANG_S)
    assert response.status_code == status
    assert response.json()["error"]["param"] == "body"


def test_wrong_input_over_grpc_is_an_invalid_argument(demo: Stack) -> None:
    requests = {
        "max_tokens": inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(text="x"),
            options=generation_options(max_tokens=-1),
        ),
        "presence_penalty": inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(text="x"),
            options=generation_options(presence_penalty=-3),
        ),
        "prompt": inference_pb2.GenerateRequest(),
        "model": inference_pb2.GenerateRequest(
            model="other", prompt=inference_pb2.Prompt(text="x")
        ),
    }
    with demo.inference() as stub:
        for field, request in requests.items():
            with pytest.raises(grpc.RpcError) as error:
                stub.Generate(request, timeout=HANG_S)
            is_unknown = field == "model"
            code = grpc.StatusCode[("INVALID_ARGUMENT", "NOT_FOUND")[is_unknown]]
            assert error.value.code() is code
            assert (error.value.details() or "").startswith(field)


def test_a_request_that_is_too_large_is_not_even_received(demo: Stack) -> None:
    prompt = inference_pb2.Prompt(text="x" * 50_000_000)
    with demo.inference() as stub, pytest.raises(grpc.RpcError, match="larger than max") as error:
        stub.Generate(inference_pb2.GenerateRequest(prompt=prompt), timeout=HANG_S)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_full_pool_says_when_to_come_back(demo: Stack, client: openai.OpenAI) -> None:
    body = {"prompt": "x", "n": 3, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{demo.http}/v1/completions", json=body, timeout=HANG_S) as busy:
        lines = busy.iter_lines()  # kept: the response is closed with its iterator
        next(lines)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="demo", prompt="y")
        assert int(error.value.response.headers["retry-after"]) >= 1
        with demo.inference() as stub, pytest.raises(grpc.RpcError) as refused:
            stub.Generate(
                inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(text="y")), timeout=HANG_S
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.models.list().data[0].id == "demo"
