"""The examples run, against a real frontend."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_scheduler import FakeRequest, loses_pipeline_after, says
from tests.frontend.conftest import running

pytestmark = pytest.mark.system


async def said(program: str, *addresses: str) -> str:
    """Runs an example, which must succeed; returns what it prints."""
    example = await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        *addresses,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["protos/gen", "clients/python"])},
        stdout=subprocess.PIPE,
    )
    output, _ = await example.communicate()
    assert example.returncode == 0
    return output.decode()


async def test_openai_client_talks(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        output = await said("examples/openai_client.py", f"{site.url}/v1")
    assert "serves test-model" in output
    assert "chat: [user] Hello!" in output


@pytest.mark.thorough
async def test_openai_client_does_without_a_template(tmp_path: Path) -> None:
    async with running(tmp_path, template=None) as site:
        output = await said("examples/openai_client.py", f"{site.url}/v1")
    assert "no chat template" in output


@pytest.mark.thorough
async def test_resuming_client_talks(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        output = await said("examples/resuming_client.py", f"{site.url}/v1")
    assert "Once upon a time" in output


async def test_grpc_client_talks(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        output = await said("examples/grpc_client.py", site.frontend.grpc_address)
    assert "serves test-model on 2 stages" in output
    assert output.endswith("32 tokens\n")


async def test_grpc_client_goes_on_through_the_next_frontend(tmp_path: Path) -> None:
    async with running(tmp_path) as lost, running(tmp_path) as other:
        text = "one 世 two 🐋 three"
        tokens = other.tokens(text)
        behaviours = iter([says(*tokens), loses_pipeline_after(*tokens[:3])])

        async def fails_in_the_middle(request: FakeRequest) -> None:
            await next(behaviours)(request)

        lost.scheduler.behaviour, other.scheduler.behaviour = fails_in_the_middle, says(*tokens)
        addresses = (site.frontend.grpc_address for site in (lost, other))
        output = await said("examples/grpc_client.py", *addresses)
        (request,) = other.scheduler.requests
    assert output.split("\n\n")[2] == f"Once upon a time{text}"
    assert request.submission.generated_token_ids


@pytest.mark.thorough
async def test_agent_client_ends_with_an_answer_in_words(tmp_path: Path) -> None:
    # The model repeats its prompt, and calls nothing.
    async with running(tmp_path, tool_parser="hermes") as site:
        output = await said("examples/agent_client.py", f"{site.url}/v1")
    assert output.startswith("answer: ")
