"""Defaults of sampling that a checkpoint brings along: read, checked and applied."""

import json
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import inference_pb2

from services.common.sampling import SamplingParams
from services.frontend.request.generation_defaults import FILE, GenerationDefaults
from services.frontend.request.generation_request import DEFAULT_MAX_TOKENS, GenerationOptions
from tests.fake_scheduler import PIPELINE
from tests.frontend.conftest import Site, running
from tests.generation_options import generation_options

CONFIG = {
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.875,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "max_new_tokens": 5,
    "eos_token_id": [1, 2],
    "transformers_version": "5.0",
}
OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def written(directory: Path, config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / FILE).write_text(text, encoding="utf-8")
    return directory


def test_without_a_file_there_are_no_defaults(tmp_path: Path) -> None:
    defaults = GenerationDefaults.from_directory(tmp_path)
    assert defaults == GenerationDefaults()
    assert str(defaults) == ""


def test_only_what_a_client_leaves_out_has_a_default(tmp_path: Path) -> None:
    defaults = GenerationDefaults.from_directory(written(tmp_path, CONFIG))
    given = GenerationOptions(
        sampling=SamplingParams(temperature=1.0, seed=1), defaulted={"top_k", "top_p", "min_p"}
    )
    options = defaults.apply(given)
    assert options.sampling == SamplingParams(
        temperature=1.0, top_k=20, top_p=0.875, min_p=0.125, seed=1
    )
    assert options.default_max_tokens == 5
    assert str(defaults) == (
        "temperature 0.5, top_k 20, top_p 0.875, min_p 0.125, repetition_penalty 1.25, max_tokens 5"
    )


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.5}, 0.0),
        ({"temperature": None}, None),
        ({"temperature": 1}, 1),
    ],
    ids=str,
)
def test_no_sampling_means_temperature_zero(
    tmp_path: Path, config: dict[str, Any], temperature: float | None
) -> None:
    defaults = GenerationDefaults.from_directory(written(tmp_path, config))
    assert defaults.sampling.get("temperature") == temperature


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": 3}, "temperature: must be a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"top_k": 1.5}, "top_k: must be a whole number"),
        ({"top_p": -1}, "top_p: must be a number from 0 to 1"),
        ({"repetition_penalty": -1}, "repetition_penalty: must be a number from 0.125 to 8"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number from 1"),
        ('{"temperature": NaN}', "temperature: must be a number from 0 to 2"),
        ("{", "is not JSON"),
        ([], "holds no JSON object"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=FILE) as caught:
        GenerationDefaults.from_directory(written(tmp_path, config))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def last_options(site: Site) -> tuple[Any, ...]:
    submission = site.scheduler.requests[-1].submission
    sampling = submission.sampling
    return (*(getattr(sampling, name) for name in OWN), submission.max_new_tokens)


async def test_both_protocols_have_the_defaults(tmp_path: Path) -> None:
    written(tmp_path, CONFIG)
    message: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    own = tuple(CONFIG[name] for name in OWN)
    async with running(tmp_path) as site:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", message)):
            assert (await site.http.post(f"/v1/{path}", json=body)).status_code == 200
            assert last_options(site) == (*own, 5)
            given = {"temperature": 1.0, "repetition_penalty": 1.0, "max_tokens": 30}
            assert (await site.http.post(f"/v1/{path}", json=body | given)).status_code == 200
            assert last_options(site) == (1.0, *own[1:4], 1.0, 30)
        prompt = inference_pb2.Prompt(text="x")
        await site.inference.generate(inference_pb2.GenerateRequest(prompt=prompt))
        assert last_options(site) == (*own, 5)
        options = generation_options(temperature=1.0, top_p=1.0)
        request = inference_pb2.GenerateRequest(prompt=prompt, options=options)
        await site.inference.generate(request)
        assert last_options(site) == (1.0, 20, 1.0, 0.125, 1.25, 5)


@pytest.mark.parametrize(
    ("config", "setting"), [(CONFIG, "none"), ({}, "auto")], ids=["ignored", "empty"]
)
async def test_without_defaults_requests_are_as_before(
    tmp_path: Path, config: dict[str, Any], setting: str
) -> None:
    written(tmp_path, config)
    async with running(tmp_path, generation_config=setting) as site:
        await site.http.post("/v1/completions", json={"prompt": "x"})
        assert last_options(site) == (1, 0, 1, 0, 1, DEFAULT_MAX_TOKENS)


async def test_a_stream_goes_on_with_the_defaults(tmp_path: Path) -> None:
    written(tmp_path, CONFIG)
    async with running(tmp_path) as site:
        body = {"prompt": "x", "stream": True, "return_token_ids": True, "seed": 5}
        whole = (await site.http.post("/v1/completions", json=body)).text
        (first, *_) = [line for line in whole.splitlines() if line.startswith("id: ")]
        token = int(whole.partition('"token_ids":[')[2].partition("]")[0])
        rest = await site.http.post(
            "/v1/completions",
            json=body | {"resumption": {"seed": 5, "token_ids": [[token]]}},
            headers={"last-event-id": first.removeprefix("id: ")},
        )
        assert rest.status_code == 200
        assert whole.endswith(rest.text)
        begun, resumed = (request.submission for request in site.scheduler.requests)
        assert resumed.sampling == begun.sampling
        assert resumed.max_new_tokens == begun.max_new_tokens == 5
    assert PIPELINE.max_model_len > 5
