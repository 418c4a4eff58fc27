"""The page in a browser: it is drawn from the disk, can be moved through, and can be read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import resize, set_scheme, show
from recordings import PauseEvery, Run, Slow, write, write_healed
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from paceline.recording.healings import Healing, write_healing
from paceline.recording.rows import StepColumn
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page

pytestmark = pytest.mark.timeout(600)  # the first one may have to install the browser

NAME = "</script><img src=x onerror=alert(1)>"
View = tuple[float, float]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 2 is late by 12 ms from step 150 on; two of the ranks have a second wrapper; a rank was lost."""
    folder = tmp_path_factory.mktemp("run")
    slow = [Slow(2, 12, since=150)]
    write(Run(ranks=4, steps=300, jitter=0.05, slow=slow, names=[NAME], module="Encoder", stuck=1), folder)
    write(Run(ranks=4, steps=60, backward=5, module=NAME, wrapper=1, group=[0, 1]), folder)
    write_healing(folder, Healing(1, 9, 4, [(1, NAME), (3, "not heard of " * 20)], 0, 0.7))
    made = folder / "report.html"
    made.write_text(html_page(analyse_recording(folder)), "utf-8")
    return made


@pytest.fixture
def driver(browser: WebDriver, written: Path) -> WebDriver:
    """The page, drawn on the screen of a laptop."""
    set_scheme(browser, "light")
    resize(browser, 1366, 768)
    browser.get_log("browser")
    show(browser, written)
    return browser


def complaints(driver: WebDriver) -> list[str]:
    return [each["message"] for each in driver.get_log("browser")]


def timeline(driver: WebDriver) -> WebElement:
    return driver.find_element(By.ID, "timeline")


def view(driver: WebDriver) -> View:
    """The period that the timeline shows, in milliseconds."""
    canvas = timeline(driver)
    return float(canvas.get_attribute("data-from")), float(canvas.get_attribute("data-to"))


def width(span: View) -> float:
    return span[1] - span[0]


def press(driver: WebDriver, act: str) -> None:
    driver.find_element(By.CSS_SELECTOR, f"[data-act={act}]").click()


def colours(driver: WebDriver, canvas: str) -> int:
    """How many colours a drawing has."""
    script = """
        const canvas = document.getElementById(arguments[0]);
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    """
    return int(driver.execute_script(script, canvas))


def test_it_is_drawn_and_names_the_straggler(driver: WebDriver) -> None:
    text = driver.find_element(By.TAG_NAME, "body").text
    assert "Rank 2 has been a straggler since step 150: 12" in text
    assert "behind the other ranks since step 150. In 100% of these steps" in text
    assert "It is slow in backward" in text
    assert "Rank 2 is a straggler: look at" in text
    assert "for bucket 1, which waits for layers.8.weight" in text
    assert NAME in text
    assert not driver.find_elements(By.TAG_NAME, "img")
    assert colours(driver, "timeline") > 8
    assert complaints(driver) == []


def test_the_headline_and_the_first_tile_have_the_same_step(browser: WebDriver, tmp_path: Path) -> None:
    write(Run(ranks=3, steps=60, jitter=1.5), tmp_path)
    made = tmp_path / "report.html"
    made.write_text(html_page(analyse_recording(tmp_path)))
    show(browser, made)
    tile = browser.find_element(By.CSS_SELECTOR, "#figures .big").text
    assert f"A step takes {tile}, " in browser.find_element(By.ID, "summary").text


def test_the_network_is_not_used(driver: WebDriver) -> None:
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.execute_script("return location.protocol") == "file:"


def test_buttons_zoom_and_move(driver: WebDriver) -> None:
    home = view(driver)
    press(driver, "in")
    assert width(view(driver)) == pytest.approx(width(home) / 2, rel=0.01)
    press(driver, "left")
    assert view(driver)[0] == pytest.approx(home[0] + width(home) / 8, rel=0.01)
    press(driver, "all")
    assert width(view(driver)) > 50 * width(home)
    assert timeline(driver).get_attribute("data-detail") == "shares"
    assert colours(driver, "timeline") > 8
    press(driver, "since")
    assert "steps 147 to 154" in timeline(driver).get_attribute("aria-label")
    press(driver, "reset")
    assert view(driver) == home
    assert complaints(driver) == []


def test_wheel_drag_and_double_click_move_it(driver: WebDriver) -> None:
    home, canvas = view(driver), timeline(driver)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(driver).drag_and_drop_by_offset(canvas, 200, 0).perform()
    moved = view(driver)
    assert width(moved) == pytest.approx(width(home), rel=1e-3)
    assert moved[0] < home[0]
    # The drag has focused it, so that the wheel zooms.
    driver.execute_script(
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -300, cancelable: true}))", canvas
    )
    assert width(view(driver)) == pytest.approx(width(home) / 2.718, rel=0.05)
    ActionChains(driver).double_click(canvas).perform()
    assert view(driver) == pytest.approx(home, rel=1e-4)


def test_a_wheel_that_only_passes_scrolls_the_page(driver: WebDriver) -> None:
    home = view(driver)
    script = """
        const event = new WheelEvent("wheel", { deltaY: 300, cancelable: true });
        return arguments[0].dispatchEvent(event);
    """
    assert driver.execute_script(script, timeline(driver)) is True
    assert view(driver) == home


def test_the_timeline_is_used_by_keyboard(driver: WebDriver) -> None:
    home = view(driver)
    driver.execute_script("arguments[0].focus()", timeline(driver))

    def type_keys(keys: str) -> str:
        ActionChains(driver).send_keys(keys).perform()
        return driver.find_element(By.ID, "reading").text

    assert type_keys("+").startswith("rank 2, step 29")
    assert width(view(driver)) < width(home)
    before = view(driver)
    type_keys(Keys.ARROW_LEFT)
    assert view(driver)[0] < before[0]
    assert type_keys(Keys.ARROW_UP).startswith("rank 1")
    said = type_keys(",")
    assert said != type_keys(",")
    assert "backward" in said
    type_keys("a")
    assert width(view(driver)) > 50 * width(home)
    type_keys("0")
    assert view(driver) == home


def test_hovering_shows_what_is_there(driver: WebDriver) -> None:
    canvas = timeline(driver)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    tip = driver.find_element(By.ID, "tip")
    ActionChains(driver).move_to_element_with_offset(canvas, 0, 0).perform()
    lines = tip.text.splitlines()
    assert lines[0].startswith("rank ")
    assert lines[-1].startswith("step: ")
    assert tip.is_displayed()
    ActionChains(driver).move_to_element(driver.find_element(By.ID, "summary")).perform()
    assert not tip.is_displayed()


def test_dark_is_chosen_by_the_system_or_by_the_button(driver: WebDriver, written: Path) -> None:
    def paper() -> str:
        return driver.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = paper()
    switch = driver.find_element(By.ID, "theme")
    assert switch.get_attribute("aria-pressed") == "false"
    switch.click()
    assert switch.get_attribute("aria-pressed") == "true"
    dark = paper()
    assert dark != light
    set_scheme(driver, "dark")
    show(driver, written)
    assert paper() == dark
    driver.find_element(By.ID, "theme").click()
    assert paper() == light
    assert complaints(driver) == []


def test_nothing_moves_while_it_is_drawn(driver: WebDriver) -> None:
    script = """
        const done = arguments[0];
        const shifts = [];
        new PerformanceObserver((list) => shifts.push(...list.getEntries().map((each) => each.value)))
          .observe({ type: "layout-shift", buffered: true });
        requestAnimationFrame(() => setTimeout(() => done(shifts), 50));
    """
    assert sum(driver.execute_async_script(script)) < 0.01


@pytest.mark.parametrize("wide", [1366, 390])
def test_nothing_is_cut_off(driver: WebDriver, written: Path, wide: int) -> None:
    resize(driver, wide, 768)
    show(driver, written)
    script = """
        const wide = document.documentElement.clientWidth;
        const out = [...document.querySelectorAll("main *, header *")].filter((each) => {
          const box = each.getBoundingClientRect();
          return box.width && (box.right > wide + 1 || box.left < -1) && !each.closest(".scroller");
        });
        const names = out.map((each) => each.id || each.className || each.tagName);
        return [document.documentElement.scrollWidth - wide, names];
    """
    assert driver.execute_script(script) == [0, []]


def test_texts_have_enough_contrast(driver: WebDriver, written: Path) -> None:
    script = """
        const read = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = (colour) => read(colour).slice(0, 3).map((each) => each / 255)
          .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
          .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
        const ground = (element) => {
          for (let each = element; each; each = each.parentElement) {
            const colour = getComputedStyle(each).backgroundColor;
            if (read(colour)[3] !== 0) return colour;
          }
        };
        const poor = [];
        const check = (a, b, name) => {
          if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) poor.push(name);
        };
        for (const each of document.querySelectorAll("main *, header *")) {
          const words = [...each.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
          if (!words || !each.offsetParent) continue;
          check(light(getComputedStyle(each).color), light(ground(each)), each.textContent);
        }
        // Texts inside the drawings.
        const probe = document.body.appendChild(document.createElement("i"));
        const variable = (name) => {
          probe.style.color = `var(--${name})`;
          return light(getComputedStyle(probe).color);
        };
        for (let i = 0; i < 18; i++) check(variable(`ink-${i}`), variable(`part-${i}`), `part ${i}`);
        check(variable("bucket-ink"), variable("bucket"), "bucket");
        check(variable("muted"), variable("panel"), "axis");
        check(variable("alarm"), variable("panel"), "straggler");
        return poor;
    """
    for scheme in ("light", "dark"):
        set_scheme(driver, scheme)
        show(driver, written)
        assert driver.execute_script(script) == []


def test_each_wrapper_has_its_own_view(driver: WebDriver) -> None:
    first, second = driver.find_elements(By.CSS_SELECTOR, "#wrappers button")
    assert (first.text, second.text) == ("Encoder", NAME)
    second.click()
    assert "on 2 ranks, 60 steps" in driver.find_element(By.ID, "scope").text
    assert timeline(driver).get_attribute("aria-label").startswith("Timeline of 2 ranks")
    assert "No rank is a straggler" in driver.find_element(By.ID, "stragglers").text
    first.click()
    assert timeline(driver).get_attribute("aria-label").startswith("Timeline of 4 ranks")
    assert complaints(driver) == []


@pytest.fixture
def paused(browser: WebDriver, tmp_path: Path) -> WebDriver:
    """The page of a run whose rank 0 evaluates for 450 ms after every tenth step."""
    pauses = [PauseEvery(0, 450, 10, StepColumn.EVALUATION)]
    made = write(Run(ranks=2, steps=60, pauses=pauses), tmp_path) / "report.html"
    made.write_text(html_page(analyse_recording(tmp_path)), "utf-8")
    set_scheme(browser, "light")
    resize(browser, 1366, 768)
    show(browser, made)
    return browser


def test_pauses_have_a_tile_a_place_in_the_timeline_and_a_cause(paused: WebDriver) -> None:
    figures = paused.find_element(By.ID, "figures").text
    assert "evaluation on rank 0: 5 pauses, 2.3 s together, the longest 450 ms after step" in figures
    assert "Evaluate less often" in paused.find_element(By.ID, "suggestions").text
    assert "60 steps" in paused.find_element(By.ID, "scope").text
    assert paused.find_element(By.ID, "scope").text.endswith("Figures are of steps 1 to 59.")
    press(paused, "pause")
    reading = paused.find_element(By.ID, "reading").text
    assert reading.startswith("rank 0, step ")
    assert reading.endswith("pauses 450 ms (evaluation)")
    assert [0x4B, 0x50, 0x59] in middle_colours(paused)
    assert complaints(paused) == []


def test_the_longest_pause_is_shown_whichever_rank_is_chosen(browser: WebDriver, tmp_path: Path) -> None:
    pauses = [Slow(0, 300, 20, 21, "data"), Slow(1, 900, 40, 41, "loss")]
    made = write(Run(ranks=2, steps=60, slow=pauses), tmp_path) / "report.html"
    made.write_text(html_page(analyse_recording(tmp_path)))
    show(browser, made)
    press(browser, "pause")
    assert browser.find_element(By.ID, "reading").text.startswith("rank 1, step 40")


def test_steps_that_a_straggler_makes_longer_are_not_drawn_as_pauses(
    browser: WebDriver, tmp_path: Path
) -> None:
    late = Slow(1, 200, 140, part="data")
    made = write(Run(ranks=2, steps=200, slow=[late]), tmp_path) / "report.html"
    made.write_text(html_page(analyse_recording(tmp_path)))
    show(browser, made)
    assert not browser.find_element(By.CSS_SELECTOR, "[data-act=pause]").is_displayed()
    assert "pauses\n0%" in browser.find_element(By.ID, "figures").text


def test_what_is_drawn_adds_up_to_the_wall_time(paused: WebDriver) -> None:
    script = """
        return timeline.run.ranks.map((rank) => {
          const drawn = timeline.run.totals(rank).reduce((sum, total) => sum + total[rank.length], 0);
          return drawn / (rank.finish(rank.length - 1) - rank.begins[0]);
        });
    """
    assert paused.execute_script(script) == pytest.approx([1, 1], rel=0.001)


@pytest.fixture
def healed(browser: WebDriver, tmp_path: Path) -> WebDriver:
    """The page of a run that was healed at steps 20 and 40, for half a second each."""
    write_healed(Run(ranks=3, steps=60), tmp_path, [(20, 2), (40, 0)], pause=500)
    made = tmp_path / "report.html"
    made.write_text(html_page(analyse_recording(tmp_path)), "utf-8")
    set_scheme(browser, "light")
    resize(browser, 1366, 768)
    show(browser, made)
    return browser


def middle_colours(driver: WebDriver) -> list[list[int]]:
    """The colours of the timeline from top to bottom, in its middle."""
    script = """
        const canvas = document.getElementById("timeline");
        return [...canvas.getContext("2d").getImageData(canvas.width / 2, 0, 1, canvas.height).data];
    """
    cells = driver.execute_script(script)
    return [cells[start : start + 3] for start in range(0, len(cells), 4)]


def test_healings_are_told_and_marked_in_the_timeline(healed: WebDriver) -> None:
    words = ["rank 2 at step 20 (SIGKILL), 0.5 s", "rank 0 at step 40 (SIGKILL), 0.5 s"]
    told = healed.find_element(By.ID, "history").get_attribute("textContent")
    assert told == f"healed 2 times: {'; '.join(words)}"
    assert "2 lost and done again" in healed.find_element(By.ID, "figures").text
    buttons = healed.find_elements(By.CSS_SELECTOR, "#healings li button")
    assert [button.text for button in buttons] == words
    assert "healed here" not in timeline(healed).get_attribute("aria-label")
    buttons[1].click()
    assert timeline(healed).get_attribute("aria-label").endswith(f"healed here: {words[1]}")
    # It is in the middle of the view, with a mark on the axis and nothing of the ranks below it.
    found = middle_colours(healed)
    assert found[17] == [0x7B, 0x2C, 0xBF]
    assert found[40] == found[90] == found[140]
    assert healed.find_element(By.ID, "reading").text == f"rank 0, after step 39; healed: {words[1]}"
    assert complaints(healed) == []


def test_hovering_over_a_healing_shows_what_happened(healed: WebDriver) -> None:
    healed.find_elements(By.CSS_SELECTOR, "#healings li button")[0].click()
    canvas = timeline(healed)
    healed.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(healed).move_to_element_with_offset(canvas, 0, 0).perform()
    assert healed.find_element(By.ID, "tip").text == "healed: rank 2 at step 20 (SIGKILL), 0.5 s"


def test_the_timeline_of_a_healed_run_can_be_moved_through(healed: WebDriver) -> None:
    press(healed, "all")
    assert timeline(healed).get_attribute("aria-label").count("SIGKILL") == 2
    healed.execute_script("arguments[0].focus()", timeline(healed))
    ActionChains(healed).send_keys("0").perform()
    reading = healed.find_element(By.ID, "reading")
    seen = []
    for _ in range(40):
        ActionChains(healed).send_keys(",").perform()
        seen.append(reading.text.split(":")[0])
    assert "rank 0, step 41" in seen
    assert "rank 0, step 39" in seen
    assert "rank 0, step 20 (lost)" in seen
    assert complaints(healed) == []


def test_a_healing_outside_of_the_timeline_cannot_be_shown(driver: WebDriver) -> None:
    [button] = driver.find_elements(By.CSS_SELECTOR, "#healings li button")
    assert not button.is_enabled()
    assert NAME in button.text


def test_odd_recordings_are_drawn_too(browser: WebDriver, tmp_path: Path) -> None:
    odd: dict[str, Callable[[], Run]] = {
        "one step": lambda: Run(ranks=1, steps=2, buckets=1, parameters=1, count=0),
        "many": lambda: Run(ranks=40, steps=12, buckets=30, parameters=60),
    }
    for name, run in odd.items():
        folder = tmp_path / name
        made = write(run(), folder) / "report.html"
        made.write_text(html_page(analyse_recording(folder)))
        show(browser, made)
        assert colours(browser, "timeline") > 5
        assert complaints(browser) == []
