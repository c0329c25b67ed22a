"""Sends watchers an event about each call of a scheduling core's methods: the arguments, and the
core's decision.

The methods of one `Scheduler` object are wrapped, so that neither `Scheduler` nor its callers
depend on watchers. While no watcher has asked for decisions, a wrapped call only checks a flag in
addition.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orcinus.v1 import watch_pb2

from services.scheduler.core.admission.grammar_gate import DueGrammar
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.watching.core_facts import facts_of
from services.scheduler.watching.decisions import Decisions
from services.scheduler.watching.selections import selection_of

Decision = dict[str, Any]
"""The name of a field of `DecisionEvent` and the field's value; empty if there is no event to
send."""


def tell_calls(core: Scheduler, decisions: Decisions, *, pipeline: int) -> None:
    """Wraps the methods of a new scheduling core. From then on, watchers that have asked for
    decisions get an event about each call. `pipeline` is the number of the core's pipeline."""
    number = decisions.n_cores
    decisions.n_cores += 1
    decisions.core_numbers[core] = number
    for method, decision_of in _DECISIONS.items():
        name = method.__name__
        call = partial(_call, getattr(core, name), partial(decision_of, decisions, core))
        setattr(core, name, partial(call, decisions, number))
    if decisions.are_wanted:
        facts = facts_of(core, is_first=number == 0, pipeline=pipeline)
        decisions.begin()
        decisions.tell(number, core=facts.model_dump_json())


def _call(
    method: Callable[..., Any],
    decision_of: Callable[..., Decision],
    decisions: Decisions,
    core_number: int,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Calls a method of a core and returns the result. If `decision_of` makes a decision from the
    result and the arguments, sends it to watchers."""
    if not decisions.are_wanted:
        return method(*arguments, **options)
    decisions.begin()
    result = method(*arguments, **options)
    if decision := decision_of(result, *arguments, **options):
        decisions.tell(core_number, **decision)
    return result


def _cancellation(decisions: Decisions, request: Request) -> Decision:
    if not decisions.knows(request):  # the request had ended before
        return {}
    return {"cancellation": decisions.number(request)}


def _expiry(decisions: Decisions, ends: list[Update]) -> Decision:
    numbers = [decisions.number(end.request) for end in ends]
    return {"expiry": watch_pb2.ExpiryDecision(numbers=numbers)} if numbers else {}


def _selection(decisions: Decisions, core: Scheduler, batch: Batch | None) -> Decision:
    if batch is None and core.n_in_flight == core.pipeline_depth:
        return {}
    return {"selection": selection_of(batch, decisions.number)}


def _due_grammar(decisions: Decisions, due: DueGrammar | None) -> Decision:
    return {} if due is None else {"due_grammar": decisions.grammar(due.digest)}


def _grammar(decisions: Decisions, digest: bytes, failure: str) -> Decision:
    number = decisions.grammar(digest)
    return {"grammar": watch_pb2.GrammarDecision(number=number, has_failed=bool(failure))}


def _result(
    decisions: Decisions,
    iteration: int,
    token_ids: Sequence[int],
    *,
    cut: Sequence[int] = (),
    broken: Sequence[int] = (),
) -> Decision:
    tokens = decisions.tokens(token_ids)
    result = watch_pb2.ResultDecision(iteration=iteration, token_ids=tokens, cut=cut, broken=broken)
    return {"result": result}


_DECISIONS: Mapping[Callable[..., Any], Callable[..., Decision]] = {
    Scheduler.submit: lambda to, core, result, request: {"submission": to.submission(request)},
    Scheduler.adopt: lambda to, core, ends: {"adoption": watch_pb2.AdoptionDecision()},
    Scheduler.suspend: lambda to, core, result, iteration=0, **kind: {
        "suspension": watch_pb2.SuspensionDecision(iteration=iteration, **kind)
    },
    Scheduler.resume: lambda to, core, result, earlier: {
        "resumption": watch_pb2.ResumptionDecision(core_number=to.core_numbers[earlier])
    },
    Scheduler.drain: lambda to, core, result, is_last=False: {
        "drain": watch_pb2.DrainDecision(is_last=is_last)
    },
    Scheduler.release_late: lambda to, core, result: {"lateness": watch_pb2.LatenessDecision()},
    Scheduler.cancel: lambda to, core, ends, request: _cancellation(to, request),
    Scheduler.expire: lambda to, core, ends, now: _expiry(to, ends),
    Scheduler.give_up: lambda to, core, ends, request, message: {"surrender": to.number(request)},
    Scheduler.next_grammar: lambda to, core, due: _due_grammar(to, due),
    Scheduler.note_grammar: lambda to, core, ends, digest, failure="": _grammar(
        to, digest, failure
    ),
    Scheduler.select: _selection,
    Scheduler.apply: lambda to, core, updates, iteration, token_ids, logprobs=None, **places: (
        _result(to, iteration, token_ids, **places)
    ),
    Scheduler.learn_overhead: lambda to, core, is_news, n_tokens: (
        {"overhead_tokens": n_tokens} if is_news else {}
    ),
}
"""For each method of `Scheduler`, a function that returns the decision of a call. The function
takes the `Decisions`, the core, the result of the call and the arguments of the call. The arguments
have the names that the method gives them, because callers may pass arguments by name."""
