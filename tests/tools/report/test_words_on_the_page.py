"""What the words, the numbers and the lines on the page are, and that everybody can read them."""

import re
from pathlib import Path

import pytest
from browser import resize, set_scheme, show
from pages import ROOT
from recordings import Run, Slow, write
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from paceline.tools.formatting import milliseconds, percent, plain_number, plural
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.terms import TERMS

pytestmark = pytest.mark.timeout(600)  # the first one may have to install the browser

LABELS = "#legend li, #figures dt, thead th, #run th, figcaption .title, h2:not(#plots-title, #run-title)"


@pytest.fixture
def page(browser: WebDriver, tmp_path: Path) -> WebDriver:
    """Rank 1 of three is a straggler, a hook averages, and a fourth rank has recorded nothing."""
    slow = [Slow(1, 12, since=10)]
    write(Run(ranks=4, steps=60, jitter=0.3, buffers=0.5, slow=slow, exchange="int8"), tmp_path)
    for path in tmp_path.glob("rank3-*"):
        path.unlink()
    return open_page(browser, tmp_path)


def open_page(browser: WebDriver, folder: Path) -> WebDriver:
    made = folder / "report.html"
    made.write_text(html_page(analyse_recording(folder)), "utf-8")
    set_scheme(browser, "light")
    resize(browser, 1366, 768)
    show(browser, made)
    return browser


def test_the_documentation_has_the_same_words_with_the_same_meanings() -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    table = text.split("## What the words mean")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)[1:]
    assert rows == list(TERMS.items())


def test_every_label_has_a_tooltip(page: WebDriver) -> None:
    script = """
        const labels = [...document.querySelectorAll(arguments[0])].filter((each) => each.textContent);
        return labels.map((each) => {
          const word = each.querySelector("button.term");
          const meaning = word && document.getElementById(word.getAttribute("aria-describedby"));
          return [each.textContent, word?.dataset.term ?? null, meaning?.textContent ?? null];
        });
    """
    found = page.execute_script(script, LABELS)
    assert [label for label, word, meaning in found if word not in TERMS or meaning != TERMS[word]] == []
    labels = {label for label, _, _ in found}
    assert {"exposed communication", "averaged by", "ranks without a recording", "waits for"} <= labels
    assert {"Step time", "samples per second", "delay at the end of backward"} <= labels


def test_a_tooltip_is_shown_by_mouse_and_by_keyboard_and_hidden_by_escape(page: WebDriver) -> None:
    tip = page.find_element(By.ID, "tip")
    word = page.find_element(By.CSS_SELECTOR, "#figures button.term")
    ActionChains(page).move_to_element(word).perform()
    assert tip.text == TERMS["usual step"]
    ActionChains(page).move_to_element(page.find_element(By.ID, "summary")).perform()
    assert not tip.is_displayed()
    page.execute_script("document.querySelector('#figures button.term').focus()")
    assert tip.text == TERMS["usual step"]
    ActionChains(page).send_keys(Keys.TAB).perform()
    assert tip.text == TERMS["steps per second"]
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()


def test_the_timeline_says_what_a_part_is(page: WebDriver) -> None:
    canvas = page.find_element(By.ID, "timeline")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    place = """
        const { run } = timeline, rank = run.ranks[0], row = rank.rowAt(timeline.view.to) - 1;
        const [, from, to] = run.segments(rank, row).find(([part]) => part === BACKWARD);
        return timeline.describe(timeline.x((from + to) / 2), AXIS + 4);
    """
    lines = page.execute_script(place)
    assert lines[1].startswith("backward: ")
    assert lines[2] == TERMS["backward"]


def test_the_page_writes_numbers_as_the_terminal_does(page: WebDriver) -> None:
    script = """
        return arguments[0].map((each) =>
          [number(each), percent(each), duration(each), plural(each, "step")]);
    """
    values = [0, 1, 0.0004, 0.0123, 0.054, 0.43, 1.5, 8.154, 43.66, 99.96, 432.1, 1012.3, 23456.7]
    written = [
        [plain_number(each), percent(each), milliseconds(each), plural(each, "step")] for each in values
    ]
    assert page.execute_script(script, values) == written


def test_a_plain_average_is_not_named(browser: WebDriver, tmp_path: Path) -> None:
    write(Run(ranks=2, steps=9), tmp_path)
    text = open_page(browser, tmp_path).find_element(By.ID, "run").text
    assert "bucket plans" in text
    assert "averag" not in text


def test_why_nothing_is_hidden_is_beside_the_share(browser: WebDriver, tmp_path: Path) -> None:
    write(Run(ranks=2, steps=9, buckets=1), tmp_path)
    tiles = open_page(browser, tmp_path).find_element(By.ID, "figures").text
    assert "all gradients are in one bucket, which is full only when backward ends" in tiles


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_rank_has_a_line_of_its_own_and_a_legend(page: WebDriver, scheme: str) -> None:
    set_scheme(page, scheme)
    legend = page.find_elements(By.CSS_SELECTOR, "#rank-lines li")
    assert [each.text for each in legend] == ["rank 0", "rank 1, straggler", "rank 2"]
    script = """
        const read = (canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const pixels = Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 4));
          return pixels.filter((each) => each[3] > 100);
        };
        const waiting = read(document.querySelectorAll("#plots canvas")[1]);
        const isSame = (a, b) => [0, 1, 2].every((i) => Math.abs(a[i] - b[i]) < 6);
        return [...document.querySelectorAll("#rank-lines canvas")].map((canvas) => read(canvas)[0])
          .map((colour) => [String(colour), waiting.filter((each) => isSame(each, colour)).length]);
    """
    found = page.execute_script(script)
    assert len({colour for colour, _ in found}) == 3
    assert all(pixels > 20 for _, pixels in found)
    styles = page.execute_script("return Array.from({ length: 64 }, (_, i) => JSON.stringify(lineStyle(i)))")
    assert len(set(styles)) == 64
    assert len({each.split("dashes")[1] for each in styles[:8]}) == 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_stand_out_from_the_paper(page: WebDriver, scheme: str) -> None:
    set_scheme(page, scheme)
    colours = page.execute_script(
        "return [getComputedStyle(document.body).backgroundColor, ...colours().ranks]"
    )
    paper, *lines = map(luminance, colours)
    assert len(lines) == 8
    for each in lines:
        assert (max(each, paper) + 0.05) / (min(each, paper) + 0.05) > 3


def luminance(colour: str) -> float:
    """The relative luminance of "#rrggbb" or "rgb(r, g, b)"."""
    if colour.startswith("#"):
        channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    else:
        channels = [int(each) for each in re.findall(r"\d+", colour)[:3]]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in channels)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
