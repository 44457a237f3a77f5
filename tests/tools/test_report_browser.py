"""The report in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from ds_galore.tools.report.page import write_page
from ds_galore.tools.report.reading import read_runs
from tests.tools.run_directories import metric, refresh, saved, start, warning, whole_run, write_lines

#: Milliseconds, on a machine that other tests keep busy.
PATIENCE = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for found in map(shutil.which, names) if found), None)
    assert path is not None, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one with everything and 224 matrices, one with less, and one whose texts are hostile."""
    directory = tmp_path_factory.mktemp("report")
    evil = "<b>bold</b><img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
    long = "a-run-with-a-name-that-does-not-fit-anywhere-" + "x" * 80
    whole_run(directory / "whole", steps=600, layers=56)
    write_lines(directory / long / "metrics.jsonl", [metric(1), '{"step": 2, "loss": NaN}', metric(3), '{"cut'])
    name = evil.replace("/", "\\")
    memory = {evil: {"weights": 10**10, "moments": 10**9}, "AdamW": {"weights": 10**10, "moments": 4 * 10**9}}
    events = [start(config={evil: [evil]}, memory=memory), refresh(1, {f"{evil}.{i}.q": (0.5, 0.4) for i in range(3)})]
    events += [{**saved(5), "tag": evil}, warning(3, evil), warning(3, "y" * 500)]
    write_lines(directory / name / "ds_galore.jsonl", events)
    output = directory / "report.html"
    write_page(read_runs([directory / "whole", directory / long, directory / name]), output)
    return output


class Opened:
    """The page once everything is drawn, and what went wrong since: messages in the console, and requests."""

    def __init__(self, browser: Browser, path: Path, width: int) -> None:
        phone = width < 500
        context = browser.new_context(viewport={"width": width, "height": 844}, has_touch=phone, is_mobile=phone)
        context.set_default_timeout(PATIENCE)
        self.page, self.width = context.new_page(), width
        self.wrong: list[str] = []
        requests: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        assert requests.pop(0) == path.as_uri()
        self.wrong += [url for url in requests if not url.startswith(("data:", "blob:"))]

    def until(self, expression: str, value: object) -> None:
        """Wait for it. Playwright's own way evaluates strings in the page, which the page's policy forbids."""
        end = time.monotonic() + PATIENCE / 1000
        while self.page.evaluate(expression) != value and time.monotonic() < end:
            self.page.wait_for_timeout(50)
        assert self.page.evaluate(expression) == value


@pytest.fixture(scope="module")
def phone(browser: Browser, report: Path) -> Opened:
    return Opened(browser, report, 390)


@pytest.fixture(scope="module")
def desktop(browser: Browser, report: Path) -> Opened:
    return Opened(browser, report, 1280)


LIGHT_TEXT = """(() => {
    const colour = getComputedStyle(document.querySelector("[data-figure=curve-loss] .xtick text")).fill;
    return colour.match(/\\d+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) > 3 * 128;
})()"""
MARKS = ".scatterlayer path.js-line, .scatterlayer path.point, .barlayer path, .hm image"
DRAWN = """(marks) => Object.fromEntries([...document.querySelectorAll("[data-figure]")].map((plot) =>
    [plot.dataset.figure, [plot.querySelectorAll(marks).length, plot.getBoundingClientRect().width]]))"""
TOO_WIDE = """[...document.querySelectorAll("main > section, .card, .plot, h1, h3, .chips, summary")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["phone", "desktop"])
def test_it_is_drawn_without_errors_requests_or_sideways_scrolling(request, device, scheme):
    opened: Opened = request.getfixturevalue(device)
    page = opened.page
    page.emulate_media(color_scheme=scheme)
    opened.until(LIGHT_TEXT, scheme == "dark")
    assert page.title() == "3 runs · training report"
    assert page.evaluate("innerWidth") == opened.width
    assert page.evaluate("document.documentElement.scrollWidth") <= opened.width
    assert page.evaluate(TOO_WIDE) == []
    figures = page.evaluate("JSON.parse(document.getElementById('data').textContent).figures")
    assert len(figures) == 2 + 4 + 1 + 2 + 3 * 2
    drawn = page.evaluate(DRAWN, MARKS)
    assert drawn.keys() == figures.keys()
    for key, (marks, across) in drawn.items():
        assert marks >= (1 if key.startswith(("energy", "overlap")) else 2), key
        assert 300 < across <= opened.width, key
    assert opened.wrong == []


def layout(figure: str, key: str) -> str:
    return f"document.querySelector('[data-figure={figure}]')._fullLayout.{key}"


def test_its_controls_work(desktop):
    page = desktop.page
    ticks = layout("energy-0", "yaxis.ticktext")
    assert page.evaluate(ticks) == ["q_proj", "k_proj", "gate_proj", "down_proj"]
    page.select_option("[data-rows=energy-0]", "down_proj")
    desktop.until(f"{ticks}[0]", "0")
    assert page.evaluate(layout("energy-0", "yaxis.range")) == [223.5, 167.5]
    page.click("[data-log=curve-loss]")
    desktop.until(layout("curve-loss", "yaxis.type"), "log")
    lines = "document.querySelectorAll('[data-figure=curve-lr] .trace').length"
    before = page.evaluate(lines)
    page.click("[data-run='1']")
    desktop.until(lines, before - 1)
    page.click("[data-run='1']")
    desktop.until(lines, before)
    page.click("#checkpoints .list summary")
    page.locator("#checkpoints .list td.message").first.wait_for()
    assert desktop.wrong == []


def test_hovering_tells_of_a_checkpoint_without_reading_markup_in_its_tag(desktop):
    page = desktop.page
    point = page.locator("[data-figure=saves-2] path.point").last
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    text = page.locator("[data-figure=saves-2] .hoverlayer text").first
    text.wait_for()
    assert "<b>bold</b>" in text.text_content()
    assert "1 kB written; DeepSpeed's own would be 3 kB" in text.text_content()
    assert page.title() == "3 runs · training report"
    assert desktop.wrong == []


def test_a_finger_on_a_figure_scrolls_the_page(phone):
    assert phone.page.evaluate(layout("curve-loss", "dragmode")) is False
    assert phone.page.evaluate("document.querySelector('[data-figure=curve-loss] .modebar-btn')") is None
