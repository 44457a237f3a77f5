"""The report in a real browser: Debian's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from ds_galore.tools.report.page import write_page
from ds_galore.tools.report.reading import read_runs
from tests.tools.run_directories import metric, refresh, saved, start, warning, whole_run, write_lines

WIDTHS = {"phone": 390, "desktop": 1280}
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for found in map(shutil.which, names) if found), None)
    assert path is not None, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one with everything and 224 matrices, one with less, and one whose texts are hostile."""
    directory = tmp_path_factory.mktemp("report")
    evil = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
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


def opened(browser: Browser, path: Path, *, width: int, scheme: Any = "light", **more: Any) -> tuple[Page, list[str]]:
    """The page once everything is drawn, and what went wrong: messages in the console, and requests."""
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, **more)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("data:") else wrong.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    assert wrong.pop(0) == path.as_uri()
    return page, [each for each in wrong if not each.startswith("blob:")]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", WIDTHS)
def test_it_is_drawn_without_errors_requests_or_sideways_scrolling(browser, report, device, scheme):
    page, wrong = opened(browser, report, width=WIDTHS[device], scheme=scheme, has_touch=device == "phone")
    assert wrong == []
    assert page.title() == "3 runs · training report"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= WIDTHS[device]
    wide = "[...document.querySelectorAll('main > section, .card, .plot, h1, .chips')]"
    wide += ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML)"
    assert page.evaluate(wide) == []
    figures = page.evaluate("JSON.parse(document.getElementById('data').textContent).figures")
    assert len(figures) == 2 + 4 + 1 + 2 + 2 * 3
    marks = ".scatterlayer path.js-line, .scatterlayer path.point, .barlayer path, .hm image"
    drawn = """(marks) => Object.fromEntries([...document.querySelectorAll("[data-figure]")].map((plot) => [
        plot.dataset.figure,
        [plot.querySelectorAll(marks).length,
         plot.getBoundingClientRect().width, getComputedStyle(plot.querySelector("text")).fill]]))"""
    for key, (number, across, colour) in page.evaluate(drawn, marks).items():
        assert number >= (1 if key.startswith(("energy", "overlap")) else 2), key
        assert 300 < across <= WIDTHS[device], key
        light = sum(map(int, colour[4:-1].split(",")[:3])) > 3 * 128
        assert light == (scheme == "dark"), f"{key}: text is {colour} on a {scheme} page"
    page.context.close()


def test_a_change_of_the_scheme_redraws(browser, report):
    page, wrong = opened(browser, report, width=1280)
    colour = "getComputedStyle(document.querySelector('[data-figure=curve-loss] .xtick text')).fill"
    before = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{colour} !== {json.dumps(before)}")
    assert wrong == []
    page.context.close()


def test_its_controls_work(browser, report):
    page, wrong = opened(browser, report, width=1280)
    label = "document.querySelector('[data-figure=energy-0]')._fullLayout.yaxis.ticktext"
    assert page.evaluate(label) == ["q_proj", "k_proj", "gate_proj", "down_proj"]
    page.select_option("[data-rows=energy-0]", "down_proj")
    page.wait_for_function(f"{label}[0] === '0'")
    assert page.evaluate("document.querySelector('[data-figure=energy-0]')._fullLayout.yaxis.range") == [223.5, 167.5]
    page.click("[data-log=curve-loss]")
    page.wait_for_function("document.querySelector('[data-figure=curve-loss]')._fullLayout.yaxis.type === 'log'")
    lines = "document.querySelectorAll('[data-figure=curve-lr] .trace').length"
    before = page.evaluate(lines)
    page.click("[data-run='1']")
    page.wait_for_function(f"{lines} === {before} - 1")
    page.click("[data-run='1']")
    page.wait_for_function(f"{lines} === {before}")
    assert wrong == []
    page.context.close()


def test_hovering_tells_of_a_checkpoint_without_reading_markup_in_its_tag(browser, report):
    page, wrong = opened(browser, report, width=1280)
    point = page.locator("[data-figure=saves-2] path.point").last
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    text = page.locator("[data-figure=saves-2] .hoverlayer text").first
    text.wait_for()
    assert "<img src=x" in text.text_content()
    assert "1 kB written, 3 times smaller" in text.text_content()
    assert page.title() == "3 runs · training report"
    assert wrong == []
    page.context.close()


def test_a_finger_on_a_figure_scrolls_the_page(browser, report):
    page, _ = opened(browser, report, width=390, has_touch=True, is_mobile=True)
    assert page.evaluate("document.querySelector('[data-figure=curve-loss]')._fullLayout.dragmode") is False
    assert page.evaluate("document.querySelector('[data-figure=curve-loss] .modebar-btn')") is None
    page.context.close()
