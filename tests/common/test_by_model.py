"""Settings that may have a value for each model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from services.common.by_model import ByModel, names_in, pair_in, value_for

TEXTS: TypeAdapter[Any] = TypeAdapter(ByModel[str])
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,20}", fullmatch=True)
VALUES = st.from_regex(r"[./A-Za-z0-9:_-]{1,20}", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4))
def test_pairs_are_read_as_they_were_written(values: dict[str, str]) -> None:
    texts = [f"{name}={value}" for name, value in values.items()]
    for given_as in (",".join(texts), texts, tuple(values.items())):
        pairs = TEXTS.validate_python(given_as)
        assert dict(pairs) == values
        assert names_in(pairs) == tuple(values)


@pytest.mark.parametrize(
    "text", ["/a=b/c", "./a=b", "~/a=b", "plain", "ipv4:10.0.0.1:5,10.0.0.2:5", "/a,b"]
)
def test_a_value_alone_is_for_all_models(text: str) -> None:
    assert TEXTS.validate_python(text) == (("", text),)
    assert pair_in(text) == ("", text)


def test_addresses_with_commas_belong_to_their_model() -> None:
    pairs = TEXTS.validate_python("a=ipv4:10.0.0.1:5,10.0.0.2:5,b=host:1")
    assert pairs == (("a", "ipv4:10.0.0.1:5,10.0.0.2:5"), ("b", "host:1"))


@pytest.mark.parametrize("path", ["/b", "./b", "~/b"])
def test_a_path_after_a_comma_is_another_value(path: str) -> None:
    assert TEXTS.validate_python(f"a=/a,{path}") == (("a", "/a"), ("", path))


def test_a_value_for_one_model_comes_before_that_for_all() -> None:
    pairs = TEXTS.validate_python("plain,b=special")
    assert (value_for("a", pairs), value_for("b", pairs)) == ("plain", "special")
    assert value_for("a", TEXTS.validate_python("b=special")) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a=1,a=2", "several values for the model a"), (["x", "y"], "several values for all models")],
)
def test_a_second_value_for_a_model_is_refused(text: object, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TEXTS.validate_python(text)
