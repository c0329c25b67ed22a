"""A rank compiles a grammar beside its other work."""

from pathlib import Path

from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.grammar.grammars import Grammars

TOKENIZER = Path("models/demo/tokenizer.json")


def test_other_work_goes_on_while_a_large_grammar_is_compiled_once() -> None:
    grammars = Grammars(TOKENIZER, vocab_size=4096, eos_token_ids=[1])
    members = {f"member_{i}": {"type": "string", "maxLength": i + 1} for i in range(900)}
    schema = ClientSchema({"type": "object", "properties": members}, "schema")
    grammar = output_format.json_schema(schema)
    matcher = grammars.matcher(grammar)
    compiling = grammars._compiled[grammar]._compiling
    n_steps = 0
    while not compiling.done():
        n_steps += 1
    assert n_steps > 100  # a compiler that held the interpreter's lock would leave no step
    assert matcher.mask() == grammars.matcher(grammar).mask()
    assert grammars._compiled[grammar]._compiling is compiling
