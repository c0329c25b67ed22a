"""What users of Pydantic AI write: `pydantic_ai_client.py API URL` prints the outcomes of all
cases, over the API `chat`, `responses` or `messages`."""

import sys
from typing import Any

from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.real.clients.outcomes import report

QUESTION = "How many chicks has the puffin?"


class Burrow(BaseModel):
    """An answer, with constraints as people write them."""

    bird: str = Field(min_length=1, max_length=40)
    n_chicks: int = Field(ge=0)
    notes: dict[str, str] = {}
    found_by: str | None = None


def count_chicks(bird: str) -> str:
    """Counts the chicks of a bird."""
    return f"{len(bird)} chicks"


async def whole(model: Model) -> Any:
    """The answer after a call of a tool."""
    return (await Agent(model, tools=[count_chicks]).run(QUESTION)).output


async def streamed(model: Model) -> Any:
    """The answer after a call of a tool, from its pieces."""
    async with Agent(model, tools=[count_chicks]).run_stream(QUESTION) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


async def by_tool(model: Model) -> Any:
    """An object by a call of the output's own tool, after a call of another."""
    agent = Agent(model, tools=[count_chicks], output_type=Burrow)
    return (await agent.run("The puffin wants an object by a tool.")).output.model_dump()


async def native(model: Model) -> Any:
    """An object by the API's own way, after a call of a tool."""
    agent = Agent(model, tools=[count_chicks], output_type=NativeOutput(Burrow))
    return (await agent.run("The puffin wants an object.")).output.model_dump()


async def prompted(model: Model) -> Any:
    """An object that the prompt asks for."""
    agent = Agent(model, tools=[count_chicks], output_type=PromptedOutput(Burrow))
    return (await agent.run("The puffin wants an object.")).output.model_dump()


def main(api: str, url: str) -> None:
    if api == "messages":
        client = AsyncAnthropic(base_url=url, max_retries=0)
        provider = AnthropicProvider(anthropic_client=client)
        model: Model = AnthropicModel("parrot", provider=provider)
    else:
        kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
        model = kind("parrot", provider=OpenAIProvider(base_url=f"{url}/v1"))
    cases = [whole, streamed, by_tool, prompted]
    if api != "messages":  # the library asks no model of Anthropic's that it does not know
        cases.append(native)
    report({case.__name__: case(model) for case in cases})


if __name__ == "__main__":
    main(*sys.argv[1:])
