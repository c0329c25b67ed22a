"""The prompt of a pair: two texts, that of Qwen3-Reranker, or the operator's own."""

from services.frontend.request.text_pair import TextPair
from services.frontend.text.pair_format import PairFormat
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints


def test_texts_of_clients_are_no_places() -> None:
    format = PairFormat("{instruction}|{query}|{document}|{other}")
    prompt = format.prompt("{document}", "{query}", "{query}")
    assert prompt.text == "{query}|{document}|{query}|{other}"
    assert prompt.n_characters == len(prompt.text)


def test_the_prompt_of_qwen3_reranker_has_its_instruction() -> None:
    prompt = PairFormat().prompt("Q", "D").text
    assert "<Instruct>: Given a web search query, retrieve" in prompt
    assert "\n<Query>: Q\n<Document>: D<|im_end|>" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_a_classifier_gets_two_texts_that_are_tokenized_apart() -> None:
    pair = PairFormat(has_classifier=True).prompt("hel", "lo")
    assert pair == TextPair("hel", "lo")
    library = checkpoints.byte_level()
    tokens = Tokenizer(library).to_tokens(TextPair("hel", "lo"))
    assert list(tokens) == library.encode("hel", "lo").ids
    assert list(tokens) != library.encode("hello").ids


def test_tokens_of_the_second_text_have_ids_of_their_own_if_the_model_tells_them_apart() -> None:
    library = checkpoints.word_piece()
    tokenizer = Tokenizer(library)
    pair = TextPair("the whale", "hello world")
    plain = tokenizer.to_tokens(pair)
    cls, sep = (library.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    assert (plain[0], plain[-1]) == (cls, sep)
    first = plain.index(sep) + 1
    assert tokenizer.to_tokens(pair, type_stride=500) == (
        *plain[:first],
        *(token + 500 for token in plain[first:]),
    )
    assert tokenizer.to_tokens("the whale", type_stride=500) == plain[:first]
