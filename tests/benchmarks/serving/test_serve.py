"""Load on a real frontend, over both protocols; what is printed and written."""

from pathlib import Path

import pytest
from orcinus.v1 import scheduler_pb2

from benchmarks import records
from benchmarks.serving import serve
from tests.fake_scheduler import FakeScheduler, rejects
from tests.frontend.conftest import Site, running

SMALL = ["--requests=6", "--prompt-tokens=3-40", "--output-tokens=1-9", "--vocab-size=500"]


def where(site: Site, protocol: str) -> str:
    frontend = site.frontend
    return f"--url={site.url}" if protocol == "http" else f"--grpc={frontend.grpc_address}"


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.thorough)])
async def test_every_request_gets_its_tokens_and_a_record(
    tmp_path: Path, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    async with running(tmp_path) as site:
        options = serve.parse([where(site, protocol), *SMALL, "--rates=50,200", f"--out={out}"])
        assert await serve.run(options) == 0
        submissions = [request.submission for request in site.scheduler.requests]
    runs = records.read(out)
    planned = [
        (len(each.prompt_token_ids), each.max_new_tokens, each.sampling.min_tokens)
        for each in submissions[options.warm_up :]
    ]
    assert [run.meta["rate"] for run in runs] == [50.0, 200.0]
    # Else the prefix cache of a server would answer for it.
    prompts = {tuple(each.prompt_token_ids) for each in submissions}
    assert len(prompts) == len(submissions)
    for run in runs:
        assert [(r.n_prompt, r.n_output, r.n_output) for r in run.requests] == planned[:6]
        assert all(len(r.token_times_s) == r.n_output for r in run.requests)
        assert all(list(r.token_times_s) == sorted(r.token_times_s) for r in run.requests)
        assert run.meta["client_us_per_token"] > 0
    assert not any(each.sampling.stop_token_ids for each in submissions)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 + 3


async def test_texts_stand_for_token_ids(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        tokenizer = f"--tokenizer={tmp_path / 'tokenizer.json'}"
        options = serve.parse([where(site, "http"), *SMALL, tokenizer, '--body={"top_k": 3}'])
        assert await serve.run(options) == 0
        assert {r.submission.sampling.top_k for r in site.scheduler.requests} == {3}


async def test_failures_are_counted_and_make_the_run_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL, "no room")
    async with running(tmp_path, FakeScheduler(full)) as site:
        options = serve.parse([where(site, "http"), *SMALL, "--warm-up=0"])
        assert await serve.run(options) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-1] == "6"
    assert lines[2].startswith("failed: HTTP 429:")


async def test_a_server_that_refuses_the_first_requests_is_not_measured(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        options = serve.parse([where(site, "http"), *SMALL, '--body={"best_of": 0}'])
        with pytest.raises(RuntimeError, match=r"HTTP 400: .*best_of"):
            await serve.run(options)


def test_a_server_that_lists_no_models_needs_a_name() -> None:
    with pytest.raises(RuntimeError, match="name one with --model"):
        serve.first_model("http://127.0.0.1:1")
