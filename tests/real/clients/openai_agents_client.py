"""What users of the OpenAI Agents SDK write: `openai_agents_client.py API URL` prints the outcomes
of all cases, over the API `chat` or `responses`."""

import sys
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

from tests.real.clients.outcomes import report

QUESTION = "How many eggs has the stork?"


class Nest(BaseModel):
    """An answer."""

    bird: str
    n_eggs: int


@function_tool  # type: ignore[untyped-decorator]
def count_eggs(bird: str) -> str:
    """Counts the eggs of a bird."""
    return f"{len(bird)} eggs"


async def whole(model: Model) -> Any:
    """The answer after a call of a tool."""
    agent = Agent(name="ornithologist", model=model, tools=[count_eggs])
    return (await Runner.run(agent, QUESTION, max_turns=3)).final_output


async def streamed(model: Model) -> Any:
    """The text of all answers of a loop, from its pieces."""
    agent = Agent(name="ornithologist", model=model, tools=[count_eggs])
    result = Runner.run_streamed(agent, QUESTION, max_turns=3)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    return "".join(pieces)


async def an_object(model: Model) -> Any:
    """An object after a call that the model has to make."""
    agent = Agent(
        name="ornithologist",
        model=model,
        tools=[count_eggs],
        output_type=Nest,
        model_settings=ModelSettings(tool_choice="required"),
    )
    result = await Runner.run(agent, "The stork wants an object.", max_turns=3)
    return result.final_output.model_dump()


def main(api: str, url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    model = kind(model="parrot", openai_client=client)
    report({case.__name__: case(model) for case in (whole, streamed, an_object)})


if __name__ == "__main__":
    main(*sys.argv[1:])
