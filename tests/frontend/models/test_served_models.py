"""Several models behind one frontend, each with a scheduler of its own that does what a test
says."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from orcinus.v1 import inference_pb2, scheduler_pb2

from services.common import semconv
from services.common.adapters import adapter_traits
from services.frontend.api_keys import hash_of
from services.frontend.models.served_model import ServedModel
from services.frontend.text.tokenizer import Tokenizer
from tests.exposition import Samples
from tests.fake_scheduler import (
    PIPELINE,
    FakeScheduler,
    echo,
    keeps_quiet,
    rejects,
    says,
    stalls_after,
)
from tests.fake_watch import FakeWatch, epoch
from tests.frontend import checkpoints
from tests.frontend.conftest import Site, in_front_of, soon
from tests.generation_options import generation_options
from tests.limits import HANG_S

BIG_CONTEXT, SMALL_CONTEXT = 128, 64
HELLO = [{"role": "user", "content": "hello"}]
BOTH = "'big' and 'small' are"


@dataclass(frozen=True, slots=True)
class Fleet:
    """A frontend that serves the models `big` and `small`."""

    site: Site
    schedulers: Mapping[str, FakeScheduler]
    tokenizers: Mapping[str, Tokenizer]

    @property
    def http(self) -> httpx.AsyncClient:
        return self.site.http

    def model(self, name: str) -> ServedModel:
        """What the frontend knows of a model."""
        [found] = [model for model in self.site.frontend._models if model.names == (name,)]
        return found

    def tokens(self, name: str, text: str) -> tuple[int, ...]:
        """Tokens that a model's scheduler may say."""
        return self.tokenizers[name].to_tokens(text, add_special_tokens=False)

    async def wait_state(self, name: str, state: str) -> None:
        """Waits until the frontend says that a model is in a state."""
        async with asyncio.timeout(HANG_S):
            while self.model(name).service.model_state != state:
                await asyncio.sleep(0.01)


def _described(
    model: str, max_model_len: int, *, has_adapter: bool = False
) -> scheduler_pb2.PipelineDescription:
    description = scheduler_pb2.PipelineDescription()
    description.CopyFrom(PIPELINE)
    description.model, description.max_model_len = model, max_model_len
    if has_adapter:
        description.traits.update(adapter_traits({f"of-{max_model_len}": "d" * 64}, max_loaded=1))
    return description


@asynccontextmanager
async def fleet(
    tmp_path: Path, *, small_is_open: bool = True, has_adapters: bool = False, **settings: Any
) -> AsyncIterator[Fleet]:
    """The models have other tokenizers, templates and limits, and each says its own name."""
    small = _described("checkpoint", SMALL_CONTEXT, has_adapter=has_adapters)
    schedulers = {
        "big": FakeScheduler(
            pipeline=_described("checkpoint", BIG_CONTEXT, has_adapter=has_adapters),
            watch=FakeWatch(epoch(1, n_stages=3)),
        ),
        "small": FakeScheduler(
            pipeline=small if small_is_open else None, watch=FakeWatch(epoch(1, n_stages=4))
        ),
    }
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
    tokenizers = {"big": checkpoints.write_checkpoint(tmp_path / "a")}
    checkpoints.write_checkpoint(tmp_path / "b", chat_template="{{ messages[0].content }} indeed")
    checkpoints.sentencepiece_like().save(str(tmp_path / "b" / "tokenizer.json"))
    tokenizers["small"] = Tokenizer.from_model(tmp_path / "b")
    addresses = {name: await scheduler.start() for name, scheduler in schedulers.items()}
    async with in_front_of(
        tuple(schedulers.values()),
        tokenizers["big"],
        model=f"big={tmp_path / 'a'},small={tmp_path / 'b'}",
        scheduler=",".join(f"{name}={address}" for name, address in addresses.items()),
        **settings,
    ) as site:
        it = Fleet(site, schedulers, tokenizers)
        await it.wait_state("big", "serving")
        await it.wait_state("small", "serving" if small_is_open else "starting")
        for name, scheduler in schedulers.items():
            scheduler.behaviour = says(*it.tokens(name, f"hello {name}"[:7]))
        yield it


def keys(directory: Path, **models: Any) -> Path:
    """A file with a key for each name, limited to models unless these are None."""
    path = directory / "keys.json"
    entries = [
        {"name": name, "sha256": hash_of(name), "models": its, "may_watch": True}
        for name, its in models.items()
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


def as_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "hello", "max_output_tokens": 9},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
}


async def test_every_route_calls_the_model_that_the_request_names(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        for name, other in (("big", "small"), ("small", "big")):
            for path, body in BODIES.items():
                for scheduler in it.schedulers.values():
                    scheduler.requests.clear()
                for stream in (False, True):
                    call = {**body, "model": name, "stream": stream}
                    answer = await soon(it.http.post(path, json=call))
                    assert answer.status_code == 200, answer.text
                    assert f'"model":"{name}"' in answer.text.replace(": ", ":")
                assert len(it.schedulers[name].requests) == 2, path
                assert not it.schedulers[other].requests, path
                [prompt] = {
                    tuple(r.submission.prompt_token_ids) for r in it.schedulers[name].requests
                }
                text = it.tokenizers[name].to_text(prompt)
                assert ("indeed" in text) is (name == "small" and path != "/v1/completions")
            tokens = (
                await it.http.post("/tokenize", json={"prompt": "hello", "model": name})
            ).json()
            assert tuple(tokens["tokens"]) == it.tokenizers[name].to_tokens("hello")
            assert tokens["max_model_len"] == (BIG_CONTEXT if name == "big" else SMALL_CONTEXT)
            back = await it.http.post("/detokenize", json={"tokens": [5, 6], "model": name})
            assert back.json()["prompt"] == it.tokenizers[name].to_text([5, 6])


async def test_an_adapter_belongs_to_one_model_and_to_the_keys_of_this_model(
    tmp_path: Path,
) -> None:
    names = {name: f"of-{size}" for name, size in (("big", BIG_CONTEXT), ("small", SMALL_CONTEXT))}
    path = keys(tmp_path, all=None, one=["small"])
    async with fleet(tmp_path, has_adapters=True, api_keys_file=path) as it:
        for model, adapter in names.items():
            body = {**BODIES["/v1/completions"], "model": adapter}
            answer = await soon(it.http.post("/v1/completions", json=body, headers=as_key("all")))
            assert answer.json()["model"] == adapter
            assert it.schedulers[model].requests[-1].submission.adapter.name == adapter
            status = 200 if model == "small" else 404
            answer = await soon(it.http.post("/v1/completions", json=body, headers=as_key("one")))
            assert answer.status_code == status
        listed = (await soon(it.http.get("/v1/models", headers=as_key("one")))).json()["data"]
        assert [entry["id"] for entry in listed] == ["small", names["small"]]


async def test_an_adapter_does_not_take_the_name_of_one_of_another_model(tmp_path: Path) -> None:
    async with fleet(tmp_path, has_adapters=True) as it:
        for name, status in ((f"of-{SMALL_CONTEXT}", 400), ("small", 400), ("law", 200)):
            body = {"lora_name": name, "lora_path": "/adapters/x", "base_model_name": "big"}
            answer = await soon(it.http.post("/v1/load_lora_adapter", json=body))
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["param"] == "lora_name"
        assert list(it.schedulers["big"].adapters.digests) == ["law"]


async def test_each_model_has_its_own_limits(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        body = {"prompt": [9] * SMALL_CONTEXT, "max_tokens": 1}
        assert (await it.http.post("/v1/completions", json={**body, "model": "big"})).is_success
        answer = await it.http.post("/v1/completions", json={**body, "model": "small"})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def options(**fields: Any) -> Any:
    return generation_options(max_tokens=9, return_token_ids=True, **fields)


async def test_grpc_calls_name_their_model(tmp_path: Path) -> None:
    text = inference_pb2.Prompt(text="hello")
    async with fleet(tmp_path) as it:
        inference = it.site.inference
        for name, context in (("big", BIG_CONTEXT), ("small", SMALL_CONTEXT)):
            said = it.tokens(name, f"hello {name}"[:7])
            call = {"model": name, "prompt": text, "options": options()}
            whole = await soon(inference.generate(inference_pb2.GenerateRequest(**call)))
            assert (whole.model, tuple(whole.choices[0].token_ids)) == (name, said)
            stream = inference.stream(inference_pb2.GenerateStreamRequest(**call))
            pieces = [piece async for piece in stream]
            assert {piece.model for piece in pieces} == {name}
            assert sum((tuple(piece.choice.token_ids) for piece in pieces), ()) == said
            made = await inference.tokenize(inference_pb2.TokenizeRequest(model=name, prompt=text))
            assert tuple(made.token_ids) == it.tokenizers[name].to_tokens("hello")
            read = await inference.detokenize(
                inference_pb2.DetokenizeRequest(model=name, tokens=[5, 6])
            )
            assert read.text == it.tokenizers[name].to_text([5, 6])
            described = await inference.describe_model(name)
            assert (described.model, described.max_model_len) == (name, context)
        for wrong, code, words in (
            ("", grpc.StatusCode.INVALID_ARGUMENT, "must be given"),
            ("other", grpc.StatusCode.NOT_FOUND, BOTH),
        ):
            calls = (
                inference.generate(inference_pb2.GenerateRequest(model=wrong, prompt=text)),
                inference.tokenize(inference_pb2.TokenizeRequest(model=wrong, prompt=text)),
                inference.detokenize(inference_pb2.DetokenizeRequest(model=wrong, tokens=[5])),
                inference.describe_model(wrong),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await soon(call)
                assert caught.value.code() is code
                assert words in (caught.value.details() or "")


async def test_a_model_that_is_not_served_gets_404_and_no_name_400(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        for path, body in (BODIES | OTHERS).items():
            unknown = await it.http.post(path, json={**body, "model": "other"})
            assert unknown.status_code == 404, path
            assert BOTH in unknown.json()["error"]["message"]
            missing = await it.http.post(path, json=body)
            assert missing.status_code == 400, path
            assert "'big' and 'small'" in missing.json()["error"]["message"]
        assert (await it.http.get("/v1/models/other")).status_code == 404
        assert not any(scheduler.requests for scheduler in it.schedulers.values())


async def test_the_list_has_the_state_of_every_model(tmp_path: Path) -> None:
    async def states() -> dict[str, tuple[str, int | None]]:
        listed = (await it.http.get("/v1/models")).json()["data"]
        return {each["id"]: (each["state"], each.get("max_model_len")) for each in listed}

    async with fleet(tmp_path, small_is_open=False) as it:
        assert await states() == {"big": ("serving", BIG_CONTEXT), "small": ("starting", None)}
        it.schedulers["small"].open(_described("checkpoint", SMALL_CONTEXT))
        await it.wait_state("small", "serving")
        await it.schedulers["big"].stand_by()
        await it.wait_state("big", "unavailable")
        expected = {"big": ("unavailable", BIG_CONTEXT), "small": ("serving", SMALL_CONTEXT)}
        assert await states() == expected
        assert (await it.http.get("/v1/models/big")).json()["state"] == "unavailable"


async def test_a_key_sees_and_uses_only_its_models(tmp_path: Path) -> None:
    file = keys(tmp_path, any=None, one=["small"], none=["elsewhere"])
    async with fleet(tmp_path, api_keys_file=file, page=True) as it:

        async def listed(key: str) -> list[str]:
            answer = await it.http.get("/v1/models", headers=as_key(key))
            return [model["id"] for model in answer.json()["data"]]

        async def complete(key: str, **body: Any) -> httpx.Response:
            body = BODIES["/v1/completions"] | body
            return await soon(it.http.post("/v1/completions", json=body, headers=as_key(key)))

        assert await listed("any") == ["big", "small"]
        assert await listed("one") == ["small"]
        assert await listed("none") == []
        assert (await complete("any", model="big")).is_success
        assert (await complete("one", model="small")).json()["model"] == "small"
        assert (await complete("one")).json()["model"] == "small"  # it has no other
        unknown, hidden = await complete("one", model="other"), await complete("one", model="big")
        assert unknown.status_code == hidden.status_code == 404
        assert hidden.text == unknown.text.replace("other", "big")
        assert (await complete("none", model="big")).status_code == 404
        assert (await complete("none")).status_code == 404
        answer = await it.http.get("/v1/models/big", headers=as_key("one"))
        assert answer.status_code == 404
        watching = await it.http.get("/pipeline/events?model=big", headers=as_key("one"))
        assert watching.status_code == 404
        request = inference_pb2.GenerateRequest(model="big", prompt={"text": "hello"})
        call = it.site.inference.generate(request, metadata=tuple(as_key("one").items()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_change_of_the_keys_takes_a_model_away(tmp_path: Path) -> None:
    file = keys(tmp_path, one=["small"])
    async with fleet(tmp_path, api_keys_file=file) as it:
        keys(tmp_path, one=["big"])
        async with asyncio.timeout(HANG_S):
            while [
                model["id"]
                for model in (await it.http.get("/v1/models", headers=as_key("one"))).json()["data"]
            ] != ["big"]:
                await asyncio.sleep(0.05)


async def test_losing_one_model_leaves_the_other_as_it_is(tmp_path: Path) -> None:
    async with fleet(tmp_path, hold_s=0.0) as it:
        first, *rest = it.tokens("small", "hello w")
        it.schedulers["small"].behaviour = stalls_after(first)
        body = {"prompt": "hello", "max_tokens": 1 + len(rest), "stream": True}
        async with it.http.stream(
            "POST", "/v1/completions", json=body | {"model": "small"}
        ) as answer:
            lines = answer.aiter_lines()
            await soon(anext(lines))
            await it.schedulers["big"].stand_by()
            await it.wait_state("big", "unavailable")
            lost = await soon(it.http.post("/v1/completions", json=body | {"model": "big"}))
            assert lost.status_code == 503
            for path in ("/ready", "/serving"):
                assert (await it.http.get(path)).status_code == 200
            samples = Samples.of(it.site.frontend._registry)
            up = {
                name: samples.sum(semconv.FRONTEND_PIPELINE_UP, model=name)
                for name in it.schedulers
            }
            assert up == {"big": 0, "small": 1}
            [request] = it.schedulers["small"].requests
            for token in rest[:-1]:
                request.tokens(token)
            request.last_token(rest[-1], scheduler_pb2.COMPLETION_REASON_LENGTH)
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await it.schedulers["small"].stand_by()
        await it.wait_state("small", "unavailable")
        async with asyncio.timeout(HANG_S):
            while (await it.http.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        assert "none of 2 models" in (await it.http.get("/serving")).json()["reason"]
        await it.schedulers["big"].lead()
        await it.wait_state("big", "serving")
        async with asyncio.timeout(HANG_S):
            while (await it.http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_full_pool_refuses_calls_of_its_own_model_only(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        it.schedulers["big"].n_free = 0
        it.schedulers["big"].behaviour = keeps_quiet
        body = BODIES["/v1/completions"]
        async with it.http.stream(
            "POST", "/v1/completions", json=body | {"model": "big", "stream": True}
        ):
            full = scheduler_pb2.REJECTION_REASON_POOL_FULL
            it.schedulers["big"].behaviour = rejects(full)  # unless the frontend knows it still
            refused = await soon(it.http.post("/v1/completions", json=body | {"model": "big"}))
            taken = await soon(it.http.post("/v1/completions", json=body | {"model": "small"}))
        assert (refused.status_code, taken.status_code) == (429, 200)


async def test_a_stream_is_resumed_at_its_own_model(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        said = it.tokens("small", "hello hello hello")
        it.schedulers["small"].behaviour = says(*said)
        request = inference_pb2.GenerateStreamRequest(
            model="small",
            prompt={"text": "hello"},
            options=options(),
            resumption=inference_pb2.Resumption(
                request_id="a" * 32,
                seed=7,
                answers=[inference_pb2.AnswerSoFar(token_ids=said[:2])],
            ),
        )
        pieces = [piece async for piece in it.site.inference.stream(request)]
        assert sum((tuple(piece.choice.token_ids) for piece in pieces), ()) == said[2:]
        [resumed] = it.schedulers["small"].requests
        assert tuple(resumed.submission.generated_token_ids) == said[:2]
        assert not it.schedulers["big"].requests


async def test_requests_of_a_lost_model_wait_and_go_on(tmp_path: Path) -> None:
    async with fleet(tmp_path, hold_s=HANG_S, resume_s=HANG_S) as it:
        said = it.tokens("big", "hello w")
        it.schedulers["big"].behaviour = stalls_after(said[0])
        body = {"prompt": "hello", "max_tokens": len(said), "model": "big"}
        running = asyncio.ensure_future(it.http.post("/v1/completions", json=body))
        await it.schedulers["big"].wait_requests()
        await it.schedulers["big"].stand_by()
        await it.wait_state("big", "unavailable")
        held = asyncio.ensure_future(it.http.post("/v1/completions", json=body))
        other = await soon(it.http.post("/v1/completions", json=body | {"model": "small"}))
        assert other.is_success
        it.schedulers["big"].behaviour = says(*said)
        await it.schedulers["big"].lead()
        for answer in (await soon(running), await soon(held)):
            assert answer.json()["usage"]["completion_tokens"] == len(said)


async def test_a_request_wakes_its_own_model_while_the_other_answers(tmp_path: Path) -> None:
    async with fleet(tmp_path, small_is_open=False, wake_s=HANG_S) as it:
        big, small = it.schedulers["big"], it.schedulers["small"]
        small.note_sleep(scheduler_pb2.SLEEP_STATE_ASLEEP)
        await it.wait_state("small", "asleep")
        body = {"prompt": "hello", "max_tokens": 4, "model": "small"}
        held = asyncio.ensure_future(it.http.post("/v1/completions", json=body))
        await soon(small.wait_demand(1))
        other = await soon(it.http.post("/v1/completions", json=body | {"model": "big"}))
        assert other.is_success
        assert not any(big.demands)
        small.open(_described("checkpoint", SMALL_CONTEXT))
        assert (await soon(held)).is_success


async def test_viewers_choose_the_model_that_they_watch(tmp_path: Path) -> None:
    async with fleet(tmp_path, page=True) as it:
        assert (await it.http.get("/pipeline/events")).status_code == 400
        for name, n_stages in (("big", 3), ("small", 4)):
            async with it.http.stream("GET", f"/pipeline/events?model={name}") as answer:
                async for line in answer.aiter_lines():
                    if '"epoch"' in line:
                        assert json.loads(line.removeprefix("data: "))["n_stages"] == n_stages
                        break


async def test_the_metrics_of_calls_have_the_name_of_the_model(tmp_path: Path) -> None:
    async with fleet(tmp_path) as it:
        for scheduler in it.schedulers.values():
            scheduler.behaviour = echo
        for name, n_calls in (("big", 1), ("small", 2)):
            for _ in range(n_calls):
                body = BODIES["/v1/completions"] | {"model": name}
                assert (await soon(it.http.post("/v1/completions", json=body))).is_success
        samples = Samples.of(it.site.frontend._registry)
        for name, n_calls in (("big", 1), ("small", 2)):
            count = f"{semconv.SERVER_REQUEST_DURATION}_count"
            assert samples.sum(count, gen_ai_request_model=name) == n_calls
