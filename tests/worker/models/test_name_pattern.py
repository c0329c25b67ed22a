"""Expressions for names of modules: as Python's own matcher has them, and in bounded work."""

from __future__ import annotations

import re

import pytest

from services.common.cannot_start import CannotStart
from services.worker.models.module_targets import MAX_MATCHING_S, ModuleTargets
from services.worker.models.name_pattern import NamePattern

# Short ones: Python's own matcher would not end for longer ones.
NAMES = ("lm_head", "layers.1.mlp.gate", "mlp.experts.7.up_proj", "aaa", "a" * 9)

EXPRESSIONS = (
    "lm_head", ".*mlp.gate$", r".*\.experts\..*\d+\.(?:gate|up)_proj.*", "(?:.*)*gate",
    "(?!.*experts).*proj", "(?=.*up).*_proj$", r"^((?!gate).)*$", r"(?:[^.]+\.){3}\w+$", "(a|b|.)*",
    "(?:a{2,3}){4,}$", "(?:a?){5,9}(?:aa)*?$", r"(.*\bmlp\b)*", r"(\D*\d)*\D*$", r"(?:\S|\s)*_",
    r"(?:[a-m.]|[^a-m])*\Z", r"(?:[\d.]*[^\W\d]*)*e$", "(?:x|)*lm", r"\A(?:.|\B)*$", "(?:a{31})?$",
    "(?P<one>(?:.+)+)x", "(?:m|l)*(?:odel|m_head)$",
)  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_means_what_python_makes_of_it(expression: str) -> None:
    for name in NAMES:
        expected = re.match(expression, name) is not None
        assert NamePattern(expression).matches(name) == expected, name


HOSTILE = (
    "(a*)*b", "(a|a)*b", "((((a*)*)*)*)*b", "(?:a?){40}a{40}b", "(?:a|a)" * 30 + "b",
    ".*" * 12 + "b", "(?:(?:(?:a{0,1000}){0,1000}){0,1000}){1000}b",
)  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_an_expression_with_many_ways_is_matched_at_once(expression: str) -> None:
    assert not NamePattern(expression).matches("a" * 30)
    assert NamePattern(f"(?!{expression})").matches("a" * 30)


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("(", "no regular expression"),
        (r"(a)\1", "groupref"),
        ("a*+b", "possessive"),
        ("(?>a*)b", "atomic"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?<=a)b", "look behind"),
        ("(?:a{9999}){9999}", "1000 times"),
    ],
)
def test_what_cannot_be_bounded_is_refused_by_name(expression: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NamePattern(expression)


def test_a_module_belongs_to_the_first_list_that_names_it() -> None:
    targets = ModuleTargets([["re:.*proj"], ["re:.*", "mlp"], ["mlp.gate_proj", "gate"]])
    assert targets.of("model.mlp.gate_proj") == 1
    assert targets.of("model.gate_proj") == 0
    assert targets.of("model.gate.up_proj") == 2
    assert ModuleTargets([["mlp"]]).of("model.mlps") is None


def test_all_matches_together_have_a_limit() -> None:
    moments = iter(range(1000))
    targets = ModuleTargets([["re:a", "re:b"]], clock=lambda: float(next(moments)))
    for _ in range(int(MAX_MATCHING_S) // 2):
        targets.of("c")
    with pytest.raises(CannotStart, match=r"config\.json: quantization_config: .*'re:a'"):
        targets.of("c")
