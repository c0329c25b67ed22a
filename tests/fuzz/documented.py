"""Made-up requests to the HTTP API, by its own OpenAPI document.

schemathesis makes bodies and parameters that the document allows, and such that it does not, and
holds every answer against the document: its status, its type, its headers, its shape, and that
wrong data was refused. Data that is right by the document may be refused: it cannot say which
model there is.
"""

from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from services.frontend.http.routes import OPENAPI_PATH
from tests.fuzz import hints, rounds
from tests.fuzz.choices import Choices, examples
from tests.fuzz.conftest import SETTLE_S
from tests.fuzz.rounds import Inputs

GENERATIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"resumption": None, "max_tokens": 3},
    "/v1/chat/completions": {"resumption": None, "max_tokens": 3, "max_completion_tokens": None},
    "/v1/responses": {"max_output_tokens": 3},
    "/v1/messages": {"max_tokens": 3},
}
"""Values of fields with which a body is of an answer that is short."""

BRIEF = {"max_tokens": 3, "n": 1, "temperature": 1, "stop_token_ids": None, "min_tokens": None}
"""Values of fields with which most bodies get as far as the model."""

HEADERS = (
    *("traceparent", "Last-Event-ID", "x-request-id", "x-request-timeout"),
    *("authorization", "accept", "accept-encoding", "origin"),
)
CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": ["4xx", "5xx"]}}}
)
"""Wrong data may be refused for its size, too, which schemathesis does not expect."""


@st.composite
def cases(draw: st.DrawFn, schema: Any) -> tuple[Case[Any], dict[str, str]]:
    """Requests by the document or against it, with headers that it may not know."""
    of_generations = st.sampled_from(list(GENERATIONS)).flatmap(
        lambda path: st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]).flatmap(
            lambda mode: schema[path]["POST"].as_strategy(generation_mode=mode)
        )
    )
    case = draw(of_generations if draw(st.integers(0, 7)) else schema.as_strategy())
    is_positive = case.path in GENERATIONS and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_positive and isinstance(case.body, dict) and draw(st.booleans()):
        case.body.update({k: v for k, v in BRIEF.items() if k in case.body})
        case.body.update(GENERATIONS[case.path], model=None)
    headers = dict(draw(examples(_headers)))
    return case, headers


def _headers(choices: Choices) -> list[tuple[str, str]]:
    return [] if choices.below(2) else hints.headers(choices, HEADERS)


def send_all(url: str, session: requests.Session, inputs: Inputs) -> None:
    """Sends random requests to the API at a URL, as many as `inputs` allows. Fails at an answer
    that contradicts the OpenAPI document."""
    schema = schemathesis.openapi.from_url(url + OPENAPI_PATH, config=CONFIG)

    def check(made: tuple[Case[Any], dict[str, str]]) -> None:
        case, headers = made
        response = case.call_and_validate(
            base_url=url,
            session=session,
            headers=headers,
            timeout=SETTLE_S,
            excluded_checks=[positive_data_acceptance],
        )
        inputs.add(1, str(response.status_code))

    rounds.run(check, cases(schema), inputs)
