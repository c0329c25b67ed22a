"""The benchmark of vectors: its texts, and what it says of a run."""

from benchmarks.serving.embeddings import SHAPES, summary, texts_of


def test_texts_are_as_many_and_about_as_long_as_the_shape_says() -> None:
    for shape, (n_texts, n_words) in SHAPES.items():
        texts = texts_of(shape, "0")
        lengths = [len(text.split()) for text in texts]
        assert len(texts) == n_texts
        assert n_words * 0.7 < min(lengths) < max(lengths) < n_words * 1.3
        assert texts == texts_of(shape, "0") != texts_of(shape, "1")


def test_a_ratio_is_that_of_pairs() -> None:
    found = summary("8 long", {"ours": [1.0, 2.0, 4.0], "peer": [2.0, 2.0, 20.0]})
    assert found == {
        "texts": "8 long",
        "ours_per_s": 4.0,
        "peer_per_s": 4.0,
        "ratio": 2.0,
        "range": [1.0, 5.0],
    }
