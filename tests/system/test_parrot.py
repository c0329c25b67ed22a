"""A model that answers what its prompt holds makes any answer go through the whole system."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.limits import HANG_S
from tests.parrot import Parrot, write_parrot
from tests.system.answer_cases import CASES, Case
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

PLAIN = "Orcas hunt in pods: größer → besser."
CALL = '<tool_call>\n{"name": "write", "arguments": {"path": "a.py"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return write_parrot(tmp_path_factory.mktemp("parrot"))


@pytest.fixture(scope="module")
def stack(parrot: Parrot) -> Iterator[Stack]:
    with serving(parrot.directory) as stack:
        yield stack


def whole(stack: Stack, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message, and why it ended."""
    response = stack.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def streamed(stack: Stack, body: dict[str, Any]) -> tuple[str, str, str]:
    """The content, the arguments of the calls and the reason of the end, each joined."""
    content, arguments, reason = "", "", ""
    url = f"{stack.http}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=HANG_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                delta = choice["delta"]
                content += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    arguments += call["function"].get("arguments", "")
                reason = choice["finish_reason"] or reason
    return content, arguments, reason


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_answer_is_what_the_prompt_holds(
    parrot: Parrot, stack: Stack, temperature: float
) -> None:
    body = {"messages": parrot.conversation(PLAIN), "temperature": temperature}
    message, reason = whole(stack, body)
    assert (message["content"], reason) == (PLAIN, "stop")
    assert streamed(stack, body) == (PLAIN, "", "stop")


def test_a_completion_repeats_its_prompt(parrot: Parrot, stack: Stack) -> None:
    body = parrot.body({"says": PLAIN, "body": {"prompt": "SAYS", "max_tokens": 99}})
    choice = stack.complete(**body)
    assert (choice["text"], choice["finish_reason"]) == (PLAIN, "stop")


def test_a_call_is_read_after_earlier_turns(parrot: Parrot, stack: Stack) -> None:
    tail = [{"role": "assistant", "content": "What?"}, {"role": "user", "content": "Go on."}]
    case = {"says": CALL, "tail": tail, "body": {"messages": "SAYS", "tools": TOOLS}}
    body = parrot.body(case)
    message, reason = whole(stack, body)
    [call] = message["tool_calls"]
    assert (call["function"]["name"], reason) == ("write", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == {"path": "a.py"}
    content, arguments, reason = streamed(stack, body)
    assert (content, json.loads(arguments), reason) == ("", {"path": "a.py"}, "tool_calls")


def found(value: Any, path: str) -> Any:
    """Returns the value at a path in an answer. `*` stands for all elements of a list."""
    name, _, rest = path.partition(".")
    if not name:
        return value
    if name == "*":
        return [found(element, rest) for element in value]
    return found(value[int(name)] if isinstance(value, list) else value[name], rest)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_client_gets_the_right_answer(parrot: Parrot, stack: Stack, case: Case) -> None:
    answer = stack.post(case.path, parrot.body({"says": case.says, "body": case.body}))
    assert answer.status_code == case.status, answer.text
    for path, value in case.gets.items():
        got = found(answer.json(), path)
        assert value(got) if callable(value) else got == value, (path, got)
    names = (answer.headers.get(f"x-orcinus-{of}", "") for of in ("ignored-fields", "unenforced"))
    assert case.named in " ".join(names)
