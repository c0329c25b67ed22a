"""What users of Instructor write: `instructor_client.py API URL` prints the outcomes of all
modes, over the API `openai` or `anthropic`."""

import sys
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

from tests.real.clients.outcomes import report

MODES = {
    "openai": (
        Mode.TOOLS,
        Mode.TOOLS_STRICT,
        Mode.PARALLEL_TOOLS,
        Mode.RESPONSES_TOOLS,
        Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
        Mode.JSON,
        Mode.JSON_SCHEMA,
        Mode.MD_JSON,
    ),
    "anthropic": (Mode.TOOLS, Mode.PARALLEL_TOOLS, Mode.JSON, Mode.JSON_SCHEMA),
}


class Pond(BaseModel):
    """An answer, with constraints as people write them."""

    bird: str = Field(min_length=1)
    n_feet: int = Field(ge=0, lt=1000)


async def an_object(api: str, mode: Mode, url: str) -> Any:
    """The object that a mode gets, or several of them."""
    if api == "anthropic":
        messages = anthropic.AsyncAnthropic(base_url=url, max_retries=0)
        client: Any = instructor.from_anthropic(messages, mode=mode)
    else:
        chat = openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
        client = instructor.from_openai(chat, mode=mode)
    wanted: Any = Iterable[Pond] if mode is Mode.PARALLEL_TOOLS else Pond
    answer = await client.create(
        response_model=wanted,
        model="parrot",
        max_tokens=200,
        max_retries=0,
        messages=[{"role": "user", "content": f"The teal wants an object by {api}: {mode.name}."}],
    )
    if mode is Mode.PARALLEL_TOOLS:
        return [item.model_dump() for item in answer]
    return answer.model_dump()


def main(api: str, url: str) -> None:
    report({mode.name: an_object(api, mode, url) for mode in MODES[api]})


if __name__ == "__main__":
    main(*sys.argv[1:])
