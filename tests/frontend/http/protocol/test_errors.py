"""The error tree over HTTP."""

import pytest

from services.common import errors
from services.frontend.http.protocol.errors import _STATUSES, failure, json_response

TREE = [
    (errors.InvalidRequest("n", "must be 1"), 400, None),
    (errors.Unauthenticated("who?"), 401, "invalid_api_key"),
    (errors.PermissionDenied("not you"), 403, "permission_denied"),
    (errors.PoolFull("full", retry_after_s=1.5), 429, "rate_limit_exceeded"),
    (errors.Unavailable("gone"), 503, "unavailable"),
    (errors.StaleEpoch("old"), 503, "unavailable"),
    (errors.RequestFailed("ends the pipeline"), 500, "request_failed"),
    (errors.RequestCancelled("no"), 499, "cancelled"),
]


@pytest.mark.parametrize(("error", "status", "code"), TREE, ids=lambda value: str(value))
def test_each_error_has_its_status_and_code(
    error: errors.OrcinusError, status: int, code: str | None
) -> None:
    failed = failure(error)
    assert (failed.status, failed.code, failed.message) == (status, code, error.message)


def test_every_error_of_the_tree_has_a_status() -> None:
    tree = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OrcinusError)
    }
    assert set(_STATUSES) == tree - {errors.OrcinusError}


def test_headers_say_what_to_do() -> None:
    refused = failure(errors.Unauthenticated("who?"))
    assert refused.headers["www-authenticate"] == "Bearer"
    full = failure(errors.PoolFull("full", retry_after_s=1.5))
    assert full.headers["retry-after"] == "2"
    assert failure(errors.RequestFailed("ends the pipeline")).headers["x-should-retry"] == "false"
    for error in (errors.PoolFull("full", retry_after_s=1.5), errors.Unavailable("gone")):
        assert "x-should-retry" not in failure(error).headers


def test_answers_are_in_utf_8() -> None:
    assert json_response({"message": "naïve"}).body == '{"message":"naïve"}'.encode()
