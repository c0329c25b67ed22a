"""The screen shows the story, in any size, with and without colours."""

import io

import pytest
from rich.console import Console, Group

from services.common.watch_json import Json
from services.console.console_state import ConsoleState
from services.console.render import Screen, lines, summary
from tests.console.events import STORY, Event, T, arrival, epoch, iteration, mark, pool, told


def story(*more: Event | Json) -> ConsoleState:
    state = ConsoleState()
    for each in told(*STORY, *more):
        state.feed(each)
    return state


PLAIN = Screen(80, 24, has_colour=False)
COLOURED = Screen(80, 24)


def text_of(state: ConsoleState, screen: Screen, *, now: float = T + 0.8) -> str:
    """What a terminal of that size shows, with its commands for colours."""
    output = io.StringIO()
    console = Console(
        file=output,
        width=screen.width,
        height=screen.height,
        force_terminal=True,
        color_system="256" if screen.has_colour else None,
        no_color=not screen.has_colour,
    )
    console.print(Group(*lines(state, screen, now=now)))
    return output.getvalue()


def row(text: str, label: str) -> str:
    (found,) = (line for line in text.splitlines() if line.startswith(label))
    return found


def test_eighty_by_twenty_four_shows_everything() -> None:
    text = text_of(story(mark(1.6, "suspects", "one at a time", 3)), PLAIN)
    shown = text.splitlines()
    assert len(shown) == 24
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("Orcinus  demo  epoch 3  2 stages of 1  chunked, fcfs")
    assert shown[1].startswith("8 tokens/s   2 running   0 waiting   in flight 2 of 2")
    assert row(text, "pool").split() == ["pool", "runs", "1", "3", "waits", "-"]
    assert row(text, "1 ").split() == ["1", "cmpl-0001", "running", "7", "4/20", "0", "0", "alice"]
    assert row(text, "2 ").split() == ["2", "cmpl-0002", "stop", "50", "2/3", "0", "0", "-"]
    assert row(text, "3 ").split() == ["3", "cmpl-0003", "running", "9", "2/5", "4", "0", "-"]
    assert shown[-2:] == [
        "  2 s ago  epoch: 3, demo on 2 stages",
        "  0 s ago  suspects: one at a time (requests 3)",
    ]


def test_lanes_show_whose_iterations_and_of_which_kind() -> None:
    text = text_of(story(), PLAIN, now=T + 0.8)
    first, second = (row(text, f"stage {stage}") for stage in (0, 1))
    # Each block begins with its request: prefill of 2, decode of 1, prefill and recomputation of 3.
    assert "·2███··1▄▄▄···3███··3▞▞▞···  20%" in first
    assert "·2███··1▄▄▄···3███··3▞▞▞  20%" in second
    assert first.endswith("···  20%")
    assert "█ prefill ▄ decode ▞ recomputation" in text


def test_lanes_of_several_pipelines_have_headings() -> None:
    other = iteration(0.2, 1, {4: (9, "p", 0)})
    other.iteration.pipeline = 1
    running = pool(0.8, [], {1: 4, 3: 2, 4: 1})
    running.pool.pipelines.extend([0, 0, 1])
    more = (epoch(0.1, 4, pipeline=1), arrival(0.1, 4, 9, 9), other, running)
    text = text_of(story(*more), PLAIN)
    shown = text.splitlines()
    assert "2 pipelines  2 stages of 1" in shown[0]
    assert "in flight 4 of 4" in shown[1]
    labels = [line.split()[:2] for line in shown[2:8]]
    stages = [["stage", "0"], ["stage", "1"]]
    assert labels == [["pipeline", "0"], *stages, ["pipeline", "1"], *stages]
    assert shown[2].split() == ["pipeline", "0", "epoch", "3", "2", "running"]
    assert "4" in shown[6], "its block"
    assert "4" not in shown[3]
    assert row(text, "1 ").split()[2:4] == ["running", "0"]
    assert row(text, "4 ").split()[2:4] == ["running", "1"]
    assert summary(story(*more)).startswith("2 pipelines  epoch 4 ")
    many = [epoch(0.1, 4 + number, pipeline=number) for number in range(1, 6)]
    assert "and 4 stages more" in text_of(story(*many), Screen(80, 30, has_colour=False))


def test_lanes_move_on_while_nothing_happens() -> None:
    assert "█" not in row(text_of(story(), PLAIN, now=T + 60), "stage 0")


def test_colours_tell_requests_apart() -> None:
    text = text_of(story(), COLOURED)
    of_two, of_three = "\x1b[38;5;76m▐███\x1b", "\x1b[38;5;199m▝▞▞▞\x1b"
    assert of_two in text
    assert of_three in text


def test_without_colours_there_are_none() -> None:
    assert "\x1b[38" not in text_of(story(), PLAIN)
    assert "\x1b[3" not in text_of(story(), PLAIN)


def test_the_bar_of_memory_has_its_parts() -> None:
    text = text_of(story(), PLAIN)
    bar = row(text, "K/V")
    counts = [bar.count(glyph) for glyph in "█▓░▒·"]
    assert sum(counts) == 80 - 9 - 6
    assert counts == [6, 13, 6, 3, 37]
    assert bar.endswith(" 40%")
    assert "shared 100" in text
    assert "free 550" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 12), (20, 5), (1, 1)])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    many = [arrival(0.8, number, 5, 5, account="a" * 99) for number in range(10, 60)]
    state = story(*many, pool(0.8, list(range(10, 60)), {1: 4, 3: 2}))
    made = lines(state, Screen(width, height), now=T + 0.8)
    assert len(made) <= height
    assert max(line.cell_len for line in made) <= width


def test_requests_that_find_no_room_are_counted() -> None:
    many = [arrival(0.8, number, 5, 5) for number in range(10, 60)]
    text = text_of(story(*many, pool(0.8, list(range(10, 60)), {1: 4, 3: 2})), PLAIN)
    assert "requests more" in text
    assert row(text, "pool").split()[-1] == "+38"


def test_many_stages_are_counted() -> None:
    assert "and 12 stages more" in text_of(story(epoch(0.8, n_stages=20)), PLAIN)


def test_before_the_first_event_it_says_that_it_connects() -> None:
    assert text_of(ConsoleState(), PLAIN, now=0.0).splitlines()[0] == "Orcinus   connecting"


def test_who_is_away_is_said_on_top_of_what_was() -> None:
    text = text_of(story({"type": "away", "text": "no pipeline"}), PLAIN)
    assert text.splitlines()[0].endswith("chunked, fcfs  no pipeline")


def test_the_summary_is_a_line() -> None:
    assert summary(story(mark(1.6, "draining", ""))) == (
        "epoch 3  8 tokens/s  2 running  0 waiting  2 in flight  batch 2.0  K/V 40%"
    )
