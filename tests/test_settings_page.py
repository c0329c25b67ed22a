"""The page of all settings is made from the code, and every setting says what it is for."""

import pytest

from tests import settings_page


def test_the_page_is_as_it_would_be_written() -> None:
    found = settings_page.PAGE.read_text(encoding="utf-8")
    assert found == settings_page.page(), f"`{settings_page.COMMAND}` writes it"


@pytest.mark.parametrize("name", settings_page.SECTIONS)
def test_every_setting_has_a_description_of_full_sentences(name: str) -> None:
    texts = {key: it.description or "" for key, it in settings_page.settings_of(name).items()}
    assert [key for key, text in texts.items() if not text.rstrip().endswith(".")] == []


def test_every_number_has_a_unit() -> None:
    assert {name for name in settings_page.numbers() if not settings_page.unit_of(name)} == set()
