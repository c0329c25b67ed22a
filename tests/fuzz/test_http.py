"""Made-up requests to the HTTP API are answered as its own OpenAPI document says."""

from collections.abc import Iterator

import pytest
import requests

from tests.fuzz.conftest import System
from tests.fuzz.rounds import Inputs


@pytest.fixture
def session(unharmed: System) -> Iterator[requests.Session]:
    """A connection to a system that must not be harmed."""
    with requests.Session() as session:
        yield session


def test_every_answer_is_as_the_document_says(unharmed: System, session: requests.Session) -> None:
    from tests.fuzz import documented  # schemathesis takes more than a second to import

    documented.send_all(unharmed.stack.http, session, Inputs("HTTP by the document", share=0.05))
