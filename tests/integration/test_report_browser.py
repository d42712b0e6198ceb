"""The report in a real browser: nothing is asked of any network, nothing goes wrong, and a reader finds what is there.

Skipped, and counted, where neither `chromium` nor `google-chrome` is installed; `.ci/run` installs the former.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slea_llm.cli import main
from slea_llm.storage import write_trajectories
from tests.support.logged import booking, call, logged

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(BROWSER is None, reason="no chromium is installed"),
    pytest.mark.timeout(120),
]

OWNED = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over one log, side by side, hostile texts among it."""
    folder = tmp_path_factory.mktemp("report")
    dialogues = [
        booking(f"d{task}.{trial}", success=trial == 0, task=f"t{task}", errors=trial)
        for task in range(6)
        for trial in range(3)
    ]
    hostile = logged(f"odd {OWNED}", ([("user", OWNED)], call(OWNED, x=OWNED)), ([("tool", OWNED)], OWNED), task=OWNED)
    write_trajectories(folder / "log.jsonl", [*dialogues, hostile])
    assert main(["score", str(folder / "log.jsonl")]) == 0
    assert main(["score", str(folder / "log.jsonl"), "--set", "evaluators.rules.tool_error=-1"]) == 0
    assert main(["report", str(folder / "log.scores"), "--runs", "1", "2"]) == 0
    return folder / "log.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        running = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


class Opened:
    """A page with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        self.page = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900}).new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.address = path.as_uri()

    def clean(self) -> bool:
        """Nothing on the console, no request but the file itself, nothing from a log was run."""
        assert self.said == []
        assert self.asked == [self.address]
        assert self.page.title() != "owned"
        return True


def test_what_a_run_was_made_from_is_said_in_words(report: Path, browser: Any) -> None:
    opened = Opened(browser, report)
    [said] = [text for text in opened.page.locator("p.muted").all_inner_texts() if text.startswith("Ends:")]
    assert "parser: " in said
    assert "log.jsonl" in said
    assert not set('{}[]"') & set(said)
    assert "annotations" not in said  # there are none


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_opens_in_light_and_dark(browser: Any, report: Path, scheme: str) -> None:
    opened = Opened(browser, report, scheme)
    page = opened.page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    names = page.locator("#tabs button").evaluate_all("buttons => buttons.map(button => button.id)")
    assert names == [f"tab-{name}" for name in ("overview", "dialogues", "failures", "patterns", "review", "side")]
    for name in names:
        page.click(f"#{name}")
        assert page.locator("main > *").count() > 0
        if folder := os.environ.get("SLEA_SCREENSHOTS"):
            page.screenshot(path=str(Path(folder) / f"{name}-{scheme}.png"))
    assert opened.clean()


def test_the_plots_are_drawn(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    opened.page.wait_for_function("document.querySelectorAll('canvas').length >= 4")
    drawn = (
        "[...document.querySelectorAll('canvas')].map(canvas => canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0))"
    )
    opened.page.wait_for_function(f"({drawn}).every(Boolean)")
    assert opened.clean()


def test_search_and_filters_narrow_the_list(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    page = opened.page
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    assert page.locator("tr.pick").count() == 19
    page.keyboard.type("cannot be held (1)")
    assert page.locator("tr.pick").count() == 6
    assert page.locator("[role=status]").inner_text() == "6 of 19"
    page.fill("#search", "")
    page.select_option("#filter-end", "success")
    assert page.locator("tr.pick").count() == 6
    page.select_option("#filter-flag", "errors")
    assert page.locator("tr.pick").count() == 0
    page.select_option("#filter-end", "failure")
    assert page.locator("tr.pick").count() == 12
    assert opened.clean()


def test_a_step_shows_its_score_its_advantage_and_the_reason_beside(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    page = opened.page
    page.keyboard.press("2")
    page.fill("#search", "d0.1")
    step = page.locator(".step.harm")
    assert step.count() == 1
    assert "Error: flight AZ1 cannot be held (0)" in step.inner_text()
    assert "\u22120.40" in step.inner_text()
    assert "advantage" in step.inner_text()
    first = page.locator("#pane .step").first  # a call with a result, in a dialogue that failed
    assert "200, 86, 20" not in first.evaluate("node => node.style.backgroundColor")
    page.keyboard.press("Escape")  # out of the search field
    page.keyboard.press("a")
    assert "Coloured by advantage" in page.locator("main").inner_text()
    assert "200, 86, 20" in first.evaluate("node => node.style.backgroundColor")
    assert opened.clean()


def test_the_keyboard_goes_through_the_list(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    page = opened.page
    page.keyboard.press("2")
    titles = []
    for _ in range(3):
        titles.append(page.locator("#pane h3").inner_text())
        page.keyboard.press("j")
    page.keyboard.press("k")
    assert titles == ["d0.0", "d0.1", "d0.2"]
    assert page.locator("#pane h3").inner_text() == "d0.2"
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert opened.clean()


def test_two_runs_stand_side_by_side(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    page = opened.page
    page.keyboard.press("2")
    page.fill("#search", "d1.2")
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    halves = page.locator("#side .pane")
    assert [halves.nth(place).locator("h3").inner_text() for place in (0, 1)] == ["d1.2", "d1.2"]
    assert "\u22120.40" in halves.nth(0).inner_text()
    assert "\u22121.00" in halves.nth(1).inner_text()
    page.select_option("#pick-left", label="d2.1 (failure)")
    assert [halves.nth(place).locator("h3").inner_text() for place in (0, 1)] == ["d2.1", "d2.1"]
    assert opened.clean()


def test_what_a_log_holds_is_shown_as_it_is_and_does_nothing(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    page = opened.page
    page.keyboard.press("2")
    page.fill("#search", "odd")
    assert page.locator("#pane h3").inner_text() == f"odd {OWNED}"
    assert page.locator("main img, main script, main iframe").count() == 0
    assert "49" not in page.locator("#pane").inner_text().replace("{{7*7}}", "")
    assert opened.clean()
