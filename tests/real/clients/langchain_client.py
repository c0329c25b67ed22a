"""What users of LangChain write: `langchain_client.py CASE URL` prints as JSON what it returns."""

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

QUESTION = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "title": "City",
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["name", "is_capital"],
    "additionalProperties": False,
}


def invoke(url: str) -> Any:
    """The text of a chat."""
    return model(url).invoke(QUESTION).content


def stream(url: str) -> Any:
    """The text of a chat in pieces, and the tokens that the last one counts."""
    pieces = list(model(url, stream_usage=True).stream(QUESTION))
    counted = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    return {
        "text": "".join(str(piece.content) for piece in pieces),
        "n_pieces": len(pieces),
        "tokens": counted[-1]["output_tokens"],
    }


def structured(url: str) -> Any:
    """An answer of a schema."""
    return model(url).with_structured_output(CITY, method="json_schema").invoke(QUESTION)


def tool_loop(url: str) -> Any:
    """A call that the model must make, its result sent back, and the model's last word."""
    chat = model(url)
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    call = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke(messages)
    messages.append(call)
    for item in call.tool_calls:
        messages.append(ToolMessage("20 °C and sunny", tool_call_id=item["id"]))
    answer = chat.bind_tools([WEATHER], tool_choice="none").invoke(messages)
    return {
        "calls": call.tool_calls,
        "reason": call.response_metadata["finish_reason"],
        "answer": answer.content,
    }


def streamed_call(url: str) -> Any:
    """A call that arrives in pieces, as LangChain joins them."""
    whole: Any = None
    bound = model(url).bind_tools([WEATHER], tool_choice="required")
    for piece in bound.stream("What is the weather in Rome?"):
        whole = piece if whole is None else whole + piece
    return whole.tool_calls


def embed(url: str) -> Any:
    """The vectors of documents."""
    model = OpenAIEmbeddings(
        model="embedder", base_url=f"{url}/v1", check_embedding_ctx_length=False
    )
    return model.embed_documents(["A lien is a right.", "A giraffe is tall.", "Nothing."])


def model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="smollm2",
        base_url=f"{url}/v1",
        temperature=0,
        max_retries=0,
        max_tokens=64,
        **options,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
