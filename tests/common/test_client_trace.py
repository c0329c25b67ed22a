"""The trace contexts of clients: in one header or several, right or malformed."""

import pytest
from opentelemetry import baggage
from opentelemetry.trace import get_current_span

from services.common.client_trace import ClientTrace
from tests.recorded_spans import PARENT_ID, TRACE_ID, TRACEPARENT, UNSAMPLED

PARENT = ("traceparent", TRACEPARENT)
IDS = f"{TRACE_ID}-{PARENT_ID}"
NEW = ("", "")


def context_of(*headers: tuple[str, str], forms: str = "tracecontext,baggage") -> tuple[str, str]:
    """Returns the trace that headers name and its state; both empty if a new trace begins."""
    context = get_current_span(ClientTrace(forms).parent_in(headers)).get_span_context()
    if not context.is_valid:
        return NEW
    assert f"{context.span_id:016x}" == PARENT_ID
    return f"{context.trace_id:032x}", context.trace_state.to_header()


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        pytest.param([("tracestate", "a=1,b=2")], "a=1,b=2", id="one"),
        pytest.param([("tracestate", "b=1"), ("tracestate", "a=2,c=3")], "b=1,a=2,c=3", id="two"),
        pytest.param([("tracestate", ""), ("tracestate", "a=1")], "a=1", id="an empty one"),
        pytest.param([("tracestate", "a=1"), ("tracestate", "a=2")], "", id="a key twice"),
        pytest.param([("tracestate", "a=1"), ("tracestate", "B A D")], "", id="malformed"),
        pytest.param([("tracestate", f"k{n}=1") for n in range(33)], "", id="too many"),
        pytest.param([("tracestate", "a=" + "x" * 300)] * 2, "", id="too long"),
    ],
)
def test_states_of_several_headers_are_joined_in_order(
    headers: list[tuple[str, str]], state: str
) -> None:
    assert context_of(PARENT, *headers) == (TRACE_ID, state)
    assert context_of(*headers) == NEW, "a state alone names no trace"


@pytest.mark.parametrize(
    ("parents", "is_continued"),
    [
        pytest.param([TRACEPARENT], True, id="one"),
        pytest.param([TRACEPARENT, UNSAMPLED], False, id="two"),
        pytest.param([TRACEPARENT, TRACEPARENT], False, id="the same one twice"),
        pytest.param([TRACEPARENT, "nonsense"], False, id="a malformed second one"),
        pytest.param([f"{TRACEPARENT},{UNSAMPLED}"], False, id="two in one header"),
        pytest.param([f"ff-{IDS}-01"], False, id="version ff"),
        pytest.param([f"01-{IDS}-01"], True, id="a later version"),
        pytest.param([f"01-{IDS}-01-more-of-it"], True, id="a later version with more"),
        pytest.param([f"01-{IDS}-01more"], False, id="a later version, run together"),
        pytest.param([f"00-{IDS}-01-more"], False, id="version 00 with more"),
        pytest.param([f"00-{IDS.upper()}-01"], False, id="upper case"),
        pytest.param([f"00-{IDS}-0G"], False, id="no flags"),
        pytest.param([f"00-{'0' * 32}-{PARENT_ID}-01"], False, id="no trace"),
        pytest.param([f"00-{TRACE_ID}-{'0' * 16}-01"], False, id="no span"),
        pytest.param([f"01-{IDS}-01-{'x' * 500}"], False, id="too long"),
        pytest.param([""], False, id="empty"),
    ],
)
def test_a_trace_goes_on_if_one_header_names_it(parents: list[str], is_continued: bool) -> None:
    headers = [("traceparent", parent) for parent in parents]
    expected = (TRACE_ID, "a=1") if is_continued else NEW
    assert context_of(*headers, ("tracestate", "a=1")) == expected


def test_baggage_of_several_headers_is_joined() -> None:
    headers = [("baggage", "a=1"), ("x-other", "b=0"), ("baggage", "b=2, c=3;p=q")]
    context = ClientTrace().parent_in(headers)
    assert baggage.get_all(context) == {"a": "1", "b": "2", "c": "3;p=q"}


@pytest.mark.parametrize("form", ["b3", "b3multi"])
def test_b3_is_read_in_both_forms(form: str) -> None:
    single = ("b3", f"{IDS}-1")
    multi = [("x-b3-traceid", TRACE_ID), ("x-b3-spanid", PARENT_ID), ("x-b3-sampled", "1")]
    assert context_of(single, forms=form) == (TRACE_ID, "")
    assert context_of(*multi, forms=form) == (TRACE_ID, "")
    assert context_of(single, single, forms=form) == NEW
    assert context_of(*multi, multi[0], forms=form) == NEW
    assert context_of(single, PARENT, PARENT, forms=form) == (TRACE_ID, ""), "not its headers"


def test_forms_that_are_not_wanted_are_not_read() -> None:
    assert context_of(PARENT, forms="b3") == NEW
    assert context_of(PARENT, forms="b3,none") == NEW
    assert context_of(("b3", f"{IDS}-1")) == NEW
    assert ClientTrace("none").headers == set()
    assert context_of(("b3", f"{IDS}-1"), forms=" TraceContext, b3 ") == (TRACE_ID, "")
