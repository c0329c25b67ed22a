"""The page of clients names the versions that `make test-real` runs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REAL = ROOT / "tests" / "real"
PAGE = (ROOT / "docs" / "use-it-with.md").read_text(encoding="utf-8")


def versions() -> dict[str, str]:
    """Returns the versions of the tested clients by the clients' names on the page."""
    packages = json.loads((REAL / "agents" / "package.json").read_text(encoding="utf-8"))
    node = {**packages["devDependencies"], **packages["optionalDependencies"]}
    locks = "".join(path.read_text(encoding="utf-8") for path in REAL.glob("*.txt"))
    python = dict(re.findall(r"^([\w-]+)==(\S+)", locks, re.M))
    return {
        "Claude Code": node["@anthropic-ai/claude-code"],
        "Codex": node["@openai/codex"],
        "opencode": node["opencode-linux-x64"],
        "Continue": node["@continuedev/cli"],
        "Vercel AI SDK": node["ai"],
        "aider": python["aider-chat"],
        "LangChain (`langchain-openai`)": python["langchain-openai"],
        "OpenAI Agents SDK": python["openai-agents"],
        "Pydantic AI": python["pydantic-ai-slim"],
        "instructor": python["instructor"],
        "LlamaIndex (`llama-index-core`)": python["llama-index-core"],
        "Cohere (`cohere`)": python["cohere"],
    }


@pytest.mark.parametrize("client", versions())
def test_the_page_has_the_version_that_is_tested(client: str) -> None:
    assert f"| {client} | {versions()[client]} |" in PAGE
