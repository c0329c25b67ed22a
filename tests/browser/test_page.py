"""What people see of a running system, in a real browser."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from services.frontend.api_keys import hash_of
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.recording import recorded as recorded_to
from tests.browser.conftest import DEMO, Visitor
from tests.scheduler.watching.play import Play
from tests.system.stack import Stack, serving

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
N_LONG = 3
VIEWS = ("pipeline", "compare", "playground")


def ask(stack: Stack, max_tokens: int, prompt: str = "Once upon a time") -> dict[str, Any]:
    return stack.complete(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


def recorded(page: Page, directory: Path) -> list[dict[str, Any]]:
    """Returns what the page saves as a recording."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as a recording").click()
    path = directory / "saved.jsonl"
    download.value.save_as(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wait_until_live(page: Page) -> None:
    expect(page.locator("#status .dot.live")).to_be_visible()


def test_the_playground_streams_and_shows_how_sure_the_model_was(
    stack: Stack, visitor: Visitor
) -> None:
    page = visitor.open(f"{stack.http}/#playground")
    page.get_by_label("Ask as").select_option("completion")
    page.get_by_label("max_tokens").fill("24")
    page.get_by_label(re.compile("^temperature")).fill("0")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("24 generated")).to_be_visible()
    shown = "".join(page.locator(".token").all_text_contents())
    assert shown == stack.complete("Once upon a time", max_tokens=24, temperature=0)["text"]
    page.locator(".token").first.hover()
    row = page.locator(".token-table tbody tr").first
    expect(row).to_contain_text(re.compile(r"\d %"))


def test_an_answer_that_was_stopped_goes_on_with_the_same_tokens(
    stack: Stack, visitor: Visitor
) -> None:
    n_tokens = 600
    page = visitor.open(f"{stack.http}/#playground")
    page.get_by_label("Ask as").select_option("completion")
    page.get_by_label("max_tokens").fill(str(n_tokens))
    page.get_by_label(re.compile("^temperature")).fill("0")
    page.locator("summary").filter(has_text="options").click()
    page.get_by_label("ignore_eos").select_option("true")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".token").nth(20)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped")).to_be_visible()
    n_shown = page.locator(".token").count()
    assert 20 < n_shown < n_tokens, "it was stopped in the middle"
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text(f"{n_tokens} generated")).to_be_visible()
    shown = "".join(page.locator(".token").all_text_contents())
    assert shown == ask(stack, n_tokens)["text"]


def test_an_answer_has_the_format_that_was_chosen(stack: Stack, visitor: Visitor) -> None:
    page = visitor.open(f"{stack.http}/#playground")
    page.get_by_label("Ask as").select_option("completion")
    page.get_by_label("Format of the output").select_option("choice")
    page.get_by_role("textbox", name="one of several texts").fill("heron\nosprey")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text(re.compile(r"\d generated"))).to_be_visible()
    assert "".join(page.locator(".token").all_text_contents()) in ("heron", "osprey")


def test_what_is_wrong_is_named(stack: Stack, visitor: Visitor) -> None:
    page = visitor.open(f"{stack.http}/#playground")
    page.get_by_label("Ask as").select_option("completion")
    page.get_by_label("max_tokens").fill("many")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("max_tokens: many is no integer")


def test_the_calls_to_copy_work(stack: Stack, visitor: Visitor) -> None:
    page = visitor.open(f"{stack.http}/#playground")
    page.get_by_label("Ask as").select_option("completion")
    page.get_by_role("button", name="curl").click()
    code = page.locator("pre[aria-label=Code]").inner_text()
    body = json.loads(code[code.index("'{") + 1 : code.rindex("'")])
    assert stack.post("/v1/completions", body).status_code == 200
    assert f"{stack.http}/v1/completions" in code
    page.get_by_role("button", name="Python").click()
    compile(page.locator("pre[aria-label=Code]").inner_text(), "sample", "exec")


def test_the_pipeline_shows_the_iterations_that_were(
    stack: Stack, visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open(f"{stack.http}/#pipeline")
    wait_until_live(page)
    with stack.iterations() as watch, ThreadPoolExecutor(N_LONG + 1) as threads:
        long = [threads.submit(ask, stack, 300) for _ in range(N_LONG)]
        watch.wait_for(lambda records: len(records) >= 5)
        threads.submit(ask, stack, 8).result()
        for one in long:
            one.result()
        watch.wait_for(lambda records: sum(len(record.ended) for record in records) == N_LONG + 1)
    last = watch.records[-1].iteration
    page.locator("summary").filter(has_text="Iterations as a table").click()
    expect(page.locator("table td").filter(has_text=re.compile(f"^{last}$"))).to_be_visible()
    saved = {
        event["iteration"]: event
        for event in recorded(page, tmp_path)
        if event["type"] == "iteration"
    }
    for record in watch.records:
        event = saved[record.iteration]
        assert event["numbers"] == list(record.numbers)
        assert event["n_tokens"] == list(record.n_tokens)
        assert len(event["stages"]) == 2
    rode = [set(record.numbers) for record in watch.records]
    late = max(set().union(*rode))
    its_rides = [at for at, numbers in enumerate(rode) if late in numbers]
    assert its_rides[0] > 0, "it joined later than the others"
    assert its_rides[-1] < len(rode) - 1, "and left before them"
    assert any(len(rode[at]) > 1 for at in its_rides), "and shared iterations with them"


def test_a_block_says_what_it_is(stack: Stack, visitor: Visitor) -> None:
    page = visitor.open(f"{stack.http}/#pipeline")
    wait_until_live(page)
    ask(stack, 100)
    page.get_by_role("button", name="Pause").click()
    canvas = page.locator("#pipeline canvas")
    canvas.focus()
    page.keyboard.press(",")
    expect(page.locator("#pipeline .tip")).to_contain_text(re.compile(r"Iteration [\d,]+"))
    before = page.locator("#pipeline .tip").inner_text()
    page.keyboard.press(",")
    expect(page.locator("#pipeline .tip")).not_to_have_text(before)
    page.keyboard.press("Escape")


def test_a_recording_is_saved_opened_and_played(
    stack: Stack, visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open(f"{stack.http}/#pipeline")
    wait_until_live(page)
    ask(stack, 50)
    expect(page.get_by_text("Nothing has run yet.")).to_have_count(0)
    events = recorded(page, tmp_path)
    assert events[0]["type"] == "recording"
    page.locator("input[type=file]").set_input_files(tmp_path / "saved.jsonl")
    expect(page.locator("#status")).to_contain_text("recording saved.jsonl")
    page.get_by_label("Speed").select_option("2")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.get_by_role("button", name="Back to live").click()
    wait_until_live(page)
    page.locator("input[type=file]").set_input_files(DEMO / "config.json")
    expect(page.get_by_role("alert")).to_contain_text("config.json: ")


def test_several_pipelines_are_told_apart(stack: Stack, visitor: Visitor, tmp_path: Path) -> None:
    async def run() -> None:
        play = Play(SchedulerSettings(n_stages=2, max_batch_size=1, speculative_tokens=0))
        beside = play.beside(1)
        async with recorded_to(play.watching, tmp_path / "two.jsonl"):
            play.open()
            beside.open()
            play.submit("stays", max_new_tokens=30)
            play.run()
            play.submit("moves", max_new_tokens=30)
            play.submit("waits")
            beside.run()
            beside.lose()
            beside.open()
            play.run()
            beside.run(3)
            await asyncio.sleep(0.3)  # until the pool is told

    with ThreadPoolExecutor(1) as threads:  # the thread of the test has a loop of its own
        threads.submit(asyncio.run, run()).result()
    page = visitor.open(f"{stack.http}/#pipeline")
    page.locator("input[type=file]").set_input_files(tmp_path / "two.jsonl")
    expect(page.locator("#status")).to_contain_text("2 pipelines")
    expect(page.get_by_role("heading", name="Pipeline 1")).to_be_visible()
    rows = page.get_by_role("region", name="Requests in the pool").locator("tbody tr")
    expect(rows.filter(has_text="stays")).to_contain_text("runs in pipeline 0")
    expect(rows.filter(has_text="moves")).to_contain_text("runs in pipeline 1")
    expect(rows.filter(has_text="waits")).not_to_contain_text("pipeline")
    expect(page.locator(".marks")).to_contain_text("pipeline 1: stage 0 is gone")
    page.locator("#pipeline canvas").focus()
    page.keyboard.press(",")
    expect(page.locator("#pipeline .tip")).to_contain_text("of pipeline 1, epoch 3")


def test_runs_are_compared_on_one_axis(stack: Stack, visitor: Visitor) -> None:
    page = visitor.open(f"{stack.http}/#compare")
    expect(page.locator("#compare canvas")).to_have_count(3)
    verdict = page.locator(".verdict").inner_text()
    found = re.search(r"([\d.]+) times as long", verdict)
    assert found is not None
    assert float(found[1]) > 1


def test_a_lost_stage_is_seen_and_the_stream_goes_on(visitor: Visitor) -> None:
    n_tokens = 900
    visitor.expected = "ERR_"  # the page outlives the system
    with serving(DEMO, stages=2, fail_fast=False) as stack:
        expected = ask(stack, n_tokens)["text"]
        page = visitor.open(f"{stack.http}/#playground")
        page.get_by_label("Ask as").select_option("completion")
        page.get_by_label("max_tokens").fill(str(n_tokens))
        page.get_by_label(re.compile("^temperature")).fill("0")
        page.locator("summary").filter(has_text="options").click()
        page.get_by_label("ignore_eos").select_option("true")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".token").nth(20)).to_be_attached()
        stack.kill("services.worker", 1)
        page.get_by_role("link", name="Pipeline").click()
        marks = page.locator(".marks")
        expect(marks).to_contain_text("lost")
        expect(marks).to_contain_text("a new pipeline serves")
        page.get_by_role("link", name="Playground").click()
        expect(page.get_by_text(f"{n_tokens} generated")).to_be_visible()
        assert "".join(page.locator(".token").all_text_contents()) == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "laptop"])
def test_everybody_can_use_it(stack: Stack, visitor: Visitor, scheme: Any, width: int) -> None:
    assert AXE.exists(), "axe is missing: make page-tools"
    page = visitor.open(
        f"{stack.http}/#pipeline",
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
        bypass_csp=True,  # for axe, which is not ours
    )
    wait_until_live(page)
    ask(stack, 30)
    for view in VIEWS:
        page.evaluate("view => { location.hash = view; }", view)
        page.locator(f"#{view} >> css=h2").first.wait_for()
        page.add_script_tag(path=AXE)
        found = page.evaluate("() => axe.run()")
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], view
        overflow = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{view} is wider than the window"


def test_only_keys_that_may_watch_watch(visitor: Visitor, tmp_path: Path) -> None:
    keys = {
        "keys": [
            {"name": "a", "sha256": hash_of("sk-watcher"), "may_watch": True},
            {"name": "b", "sha256": hash_of("sk-other")},
        ]
    }
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(keys))
    visitor.expected = "status of 40[13]|ERR_"
    with serving(DEMO, frontend=f"api-keys-file={path}") as stack:
        page = visitor.open(f"{stack.http}/#pipeline")
        expect(page.locator("#status .dot.refused")).to_be_visible()
        page.get_by_label("API key").fill("sk-other")
        page.get_by_role("button", name="Use", exact=True).click()
        expect(page.locator("#status")).to_contain_text("may_watch")
        page.get_by_label("API key").fill("sk-watcher")
        page.get_by_role("button", name="Use", exact=True).click()
        wait_until_live(page)


def test_it_comes_back_when_the_frontend_was_away(visitor: Visitor) -> None:
    visitor.expected = "ERR_|status of 503"
    with serving(DEMO, fail_fast=False) as stack:
        page = visitor.open(f"{stack.http}/#pipeline")
        wait_until_live(page)
        stack.kill("services.frontend")
        expect(page.locator("#status .dot.away")).to_be_visible()
        wait_until_live(page)
        ask(stack, 20)
        expect(page.locator(".figures dd").first).not_to_have_text(re.compile("^0"))
