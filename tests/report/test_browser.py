"""The page in headless Chromium: no errors, no network, and every control works by mouse and by keyboard.

Needs Debian's `chromium` and `chromium-driver` (elsewhere named `chromium`, `google-chrome` and
`chromedriver`) and selenium; skipped if one is missing.
"""

from __future__ import annotations

import json
import shutil
import types

import pytest
import samples
from strategies import HOSTILE

from remat.printing import printable
from remat.report import Explanation, Step, Value, groups as report_groups
from remat.units import format_bytes

selenium = pytest.importorskip("selenium", reason="needs selenium: pip install -e '.[dev]'")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)", True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,800",
)  # fmt: skip
DESKTOP, PHONE = (1280, 800), (390, 844)
MADE = {
    "small": lambda: samples.transformer(16, offload=True),
    "hostile": samples.hostile,
    "large": lambda: samples.of_size(5_000),
    "huge": lambda: samples.of_size(100_000),
    "untimed": lambda: samples.untimed(samples.transformer(2)),
    "bare": lambda: Explanation("nothing known"),
    "lives": lambda: of_lives(),
}


def of_lives() -> Explanation:
    """Return an explanation with values that live many times, once more than is shown, and never."""
    quarter = 2**20 + 2**18  # 1.25 MiB is halfway between two numbers of one decimal
    values = (
        Value(0, "recomputed", "f32[1]", quarter, tuple((i, i) for i in range(0, 24, 2)), path="often"),
        Value(1, "recomputed", "f32[2]", 8, tuple((i, i) for i in range(0, 10, 2)), path="five"),
        Value(2, "gradient", "f32[3]", 8, path="nowhere", held_in="in the memory of a result"),
    )  # fmt: skip
    steps = tuple(Step(f"step {i}", "forward" if i < 12 else "backward", 1.0) for i in range(24))
    return Explanation("lives", values=values, steps=steps)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    made = {}

    def of(name):
        if name not in made:
            explanation = MADE[name]()
            made[name] = (explanation, explanation.save(folder / f"{name}.html").as_uri())
        return made[name]

    return of


@pytest.fixture
def page(chromium, files):
    """Open a page; after the test, check that nothing was logged or requested from the network."""

    def log(kind):
        return [entry["message"] for entry in chromium.get_log(kind)]

    def visit(name="small", size=DESKTOP, scheme="light"):
        width, height = size
        chromium.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE},
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {
                "name": "prefers-reduced-motion",
                "value": "reduce",
            },  # a click does not wait for scrolling
        ]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        explanation, url = files(name)
        chromium.get(url)
        return types.SimpleNamespace(
            explanation=explanation,
            driver=chromium,
            run=chromium.execute_script,
            one=lambda selector: chromium.find_element(By.CSS_SELECTOR, selector),
            texts=lambda selector: chromium.execute_script(
                "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
                selector,
            ),
        )

    chromium.get("about:blank")
    log("browser"), log("performance")
    yield visit
    assert log("browser") == []
    events = [json.loads(message)["message"] for message in log("performance")]
    urls = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert urls and all(url.startswith(("file:", "data:")) for url in urls)


def numbers_of_step(p) -> int:
    return int(p.one("#chart").get_attribute("aria-valuenow")) - 1


STYLE = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"


def colours(p) -> set[str]:
    """Return the colours of the chart's pixels."""
    return set(
        p.run(
            "const c = document.querySelector('#chart canvas'); const seen = new Set();"
            "const copy = new OffscreenCanvas(c.width, c.height);"
            "const context = copy.getContext('2d', { willReadFrequently: true });"
            "context.drawImage(c, 0, 0);"
            "const d = context.getImageData(0, 0, c.width, c.height).data;"
            "for (let i = 0; i < d.length; i += 4) seen.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]);"
            "const hex = (n) => '#' + n.toString(16).padStart(6, '0'); return [...seen].map(hex)"
        )
    )


def keys(p, *pressed):
    ActionChains(p.driver).send_keys(*pressed).perform()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_everything_is_drawn_and_fits_the_width(page, size, scheme):
    p = page("small", size, scheme)
    assert p.run("return document.documentElement.scrollWidth <= innerWidth")
    assert len(p.texts(".tile")) == 5 and len(p.texts(".findings li")) == 3
    assert len(p.texts(".pareto .point")) == 8 and len(p.texts("tr.group")) == 48
    drawn = colours(p)
    for kind in ("argument", "saved", "recomputed", "gradient"):
        assert p.run(STYLE, f"--{kind}") in drawn, kind
    backgrounds = {"light": "rgba(255, 255, 255, 1)", "dark": "rgba(14, 17, 22, 1)"}
    assert p.one("body").value_of_css_property("background-color") == backgrounds[scheme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_background(page, scheme):
    p = page("small", DESKTOP, scheme)

    def luminance(name):
        colour = p.run(STYLE, f"--{name}")
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for text in ("text", "muted", "accent", "error", "warning", "info"):
        for ground in ("bg", "surface", "raised"):
            low, high = sorted((luminance(text), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def operation(p):
    """Return the operation that the panel shows; its path is an element of its own, to be clipped."""
    return p.one("#panel .op").get_attribute("textContent")


def test_it_starts_at_the_peak(page):
    p = page()
    assert numbers_of_step(p) == p.explanation.timeline().peak_step
    assert "the peak" in p.one("#panel .live").text
    assert "attn/softmax" in operation(p)


def test_hovering_shows_the_step_and_its_largest_values(page):
    p = page()
    chart = p.one("#chart .u-over")
    ActionChains(p.driver).move_to_element_with_offset(chart, -150, 0).perform()
    step = numbers_of_step(p)
    live = p.explanation.live_at(step)
    assert step != p.explanation.timeline().peak_step
    assert operation(p) == p.explanation.steps[step].label
    largest = p.texts("#panel li")
    assert len(largest) == 5
    assert any(value.source in largest[0] for value in live)
    assert all(" · operations " in text for text in largest)
    ActionChains(p.driver).move_to_element(p.one("h1")).perform()
    assert numbers_of_step(p) == p.explanation.timeline().peak_step


def test_a_click_keeps_the_step(page):
    p = page()
    ActionChains(p.driver).move_to_element_with_offset(
        p.one("#chart .u-over"), 60, 0
    ).click().perform()
    step = numbers_of_step(p)
    ActionChains(p.driver).move_to_element(p.one("h1")).perform()
    assert numbers_of_step(p) == step != p.explanation.timeline().peak_step
    p.one("#to-peak").click()
    assert numbers_of_step(p) == p.explanation.timeline().peak_step


def test_keys_walk_the_timeline_and_list_what_is_live(page):
    p = page()
    last = len(p.explanation.steps) - 1
    p.run("document.getElementById('chart').focus()")
    for pressed, step in [
        (Keys.HOME, 0), (Keys.ARROW_RIGHT, 1), (Keys.ARROW_RIGHT, 2), (Keys.ARROW_LEFT, 1),
        (Keys.PAGE_UP, 11), (Keys.PAGE_DOWN, 1), (Keys.ARROW_LEFT, 0), (Keys.ARROW_LEFT, 0),
        (Keys.END, last), (Keys.ARROW_RIGHT, last), ("p", p.explanation.timeline().peak_step),
    ]:  # fmt: skip
        keys(p, pressed)
        assert numbers_of_step(p) == step
        assert f"operation {step + 1} of {last + 1}" in p.one("#chart").get_attribute(
            "aria-valuetext"
        )
    keys(p, Keys.HOME, Keys.ENTER)
    live = p.explanation.live_at(0)
    assert p.one("#count").text.startswith(f"{len(live)} values in ")
    assert p.texts("#kinds .step") == ["live at operation 1 ✕"]
    keys(p, Keys.ESCAPE)
    assert p.one("#count").text.startswith(f"{len(p.explanation.values)} values in ")


def test_keys_and_dragging_zoom_the_chart(page):
    p = page()
    whole = p.one("#unzoom")
    assert not whole.is_enabled()
    p.run("document.getElementById('chart').focus()")
    keys(p, "+", "+")
    assert whole.is_enabled()
    # Moving the selection out of view scrolls the chart.
    keys(p, Keys.HOME)
    assert numbers_of_step(p) == 0
    assert p.run("return document.querySelector('#strip .at').getAttribute('x1') > 0")
    whole.click()
    assert not whole.is_enabled()
    ActionChains(p.driver).drag_and_drop_by_offset(p.one("#chart .u-over"), 120, 0).perform()
    assert whole.is_enabled()
    p.one("#by-step").click()
    assert not whole.is_enabled() and p.one("#by-step").get_attribute("aria-pressed") == "true"


def test_arguments_can_be_left_out_of_the_chart(page):
    p = page()
    argument = p.run(STYLE, "--argument")
    assert argument in colours(p)
    p.one("#arguments").click()
    assert argument not in colours(p) and p.run(STYLE, "--saved") in colours(p)
    assert "the peak" in p.one("#panel .live").text  # sums are over all values
    p.one("#arguments").click()
    assert argument in colours(p)


def test_a_finger_moves_the_line(page):
    p = page("small", PHONE)
    p.run("document.getElementById('chart').scrollIntoView()")
    box = p.run("return document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    y = box["y"] + box["height"] / 2

    def touch(kind, *x):
        points = [{"x": box["x"] + part * box["width"], "y": y} for part in x]
        p.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 0.2)
    for part in (0.25, 0.3, 0.35):
        touch("touchMove", part)
    touch("touchEnd")
    at_s = p.explanation.timeline().start_s
    assert at_s[numbers_of_step(p)] == pytest.approx(0.35 * at_s[-1], rel=0.05)


def test_segments_are_drawn_over_the_program(page):
    p = page()
    for kind in ("seg", "again"):
        titles = p.texts(f"#strip .{kind} title")
        assert len(titles) == len(p.explanation.segments)
    p.run("document.getElementById('chart').focus()")
    keys(p, Keys.HOME, Keys.PAGE_UP)
    assert p.one("#strip .about").text.startswith("block_0: forward in operations 2–13, saves ")
    assert len(p.texts("#strip .on")) == 2


def test_a_click_on_a_column_sorts_by_it(page):
    p = page()
    groups = p.explanation.groups()
    peak = p.explanation.timeline().peak_step
    at_peak = max(report_groups(p.explanation.live_at(peak)), key=lambda group: group.n_bytes)
    assert p.texts("#table tr.group td:nth-child(3)")[0] == format_bytes(at_peak.n_bytes)
    p.one('#table [data-key="bytes"]').click()
    assert p.one("th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert p.texts("#table tr.group td:nth-child(4)")[0] == "4.0 GiB"
    p.one('#table [data-key="bytes"]').click()
    assert p.one("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert p.texts("#table tr.group td:nth-child(4)")[0] == "4 B"
    for key, column in (("what", 1), ("aval", 5), ("source", 6)):
        p.one(f'#table [data-key="{key}"]').click()
        shown = p.texts(f"#table tr.group td:nth-child({column}) bdi")
        assert len(shown) == len(groups)
        assert p.run("return arguments[0].every((t, i, a) => !i || new Intl.Collator('en', "
                     "{ numeric: true }).compare(a[i - 1], t) <= 0)", shown)  # fmt: skip
        assert p.texts("th[aria-sort]") == [p.one(f'#table [data-key="{key}"]').text]
    p.one('#table [data-key="time"]').click()
    slowest = max(groups, key=lambda group: group.time_s)
    assert p.texts("#table tr.group td:nth-child(1) bdi")[0] == slowest.called


def test_lives_are_counted_and_values_without_one_say_where_they_are(page):
    p = page("lives")
    rows = {
        p.run("return arguments[0].cells[0].textContent", row): p.run(
            "const [cell] = [...arguments[0].cells].slice(-1);"
            "return cell.querySelector('[title]')?.title ?? cell.textContent",
            row,
        )
        for row in p.run("return [...document.querySelectorAll('#table tr.group')]")
    }
    assert rows["often"] == "operations 1–1, 3–3, 5–5, 7–7 and 8 more times"
    assert rows["five"].endswith("7–7 and 1 more time")
    assert rows["nowhere"] == "in the memory of a result"


def test_numbers_are_rounded_as_in_the_texts_around_them(page):
    p = page("lives")
    live = p.explanation.live_at(0)[0]
    assert p.texts("#panel li b")[0] == format_bytes(live.n_bytes) == "1.2 MiB"


def test_text_and_kinds_filter_the_table(page):
    p = page()
    box = p.one("#filter")
    box.send_keys("GELU bf16")
    shown = p.texts("#table tr.group td:nth-child(1) bdi")
    assert {name.partition(":")[0] for name in shown} == {"decoder/block_0…15/mlp/gelu"}
    assert p.one("#count").text.startswith("32 values in 2 groups")
    p.one('#kinds [data-kind="gradient"]').click()
    assert (
        p.one("#count").text == "16 values in 1 group; sum over the step 1.0 GiB, not all at once"
    )
    assert p.one('#kinds [data-kind="gradient"]').get_attribute("aria-pressed") == "true"
    box.clear()
    box.send_keys("block_3/mlp/gelu")
    assert p.texts("#table tr.group td:nth-child(1) .times") == ["1 of 16 × "]
    box.send_keys(" nothing like it")
    assert p.one("#count").text == "0 values in 0 groups"


def test_groups_open_by_keys_and_keep_the_focus(page):
    p = page()
    p.run("document.querySelector('#table .expand').focus()")
    keys(p, Keys.ENTER)
    focused = p.driver.switch_to.active_element
    assert focused.get_attribute("aria-expanded") == "true"
    assert len(p.texts("tr.child")) == 16
    assert "operations " in p.texts("tr.child")[0] and "needed by" in p.texts("tr.child")[0]
    keys(p, Keys.SPACE)
    assert not p.texts("tr.child")


def test_tab_reaches_every_control_with_a_visible_focus(page):
    p = page()
    seen = []
    for _ in range(24):
        keys(p, Keys.TAB)
        focused = p.driver.switch_to.active_element
        seen.append(focused.get_attribute("id") or focused.get_attribute("class") or focused.text)
        assert focused.value_of_css_property("outline-style") == "solid", seen[-1]
    order = ["skip", "arguments", "to-peak", "by-time", "by-step", "chart", "filter"]
    assert [name for name in seen if name in order] == order
    assert "Value" in seen and "expand" in seen


def test_a_phone_sorts_by_a_menu(page):
    p = page("small", PHONE)
    menu = p.one("#sort")
    assert menu.is_displayed() and not p.one("#table thead").is_displayed()
    menu.send_keys("source")
    shown = p.texts("#table tr.group td:nth-child(6) bdi")
    assert shown[0] == "model.py:22 (attn)"


def test_hostile_texts_are_shown_as_they_are(page):
    p = page("hostile")
    assert p.run("return window.hacked") is None
    for i in range(len(p.texts(".expand"))):
        p.run("document.querySelectorAll('.expand')[arguments[0]].click()", i)
    shown = p.texts("bdi")
    for text in HOSTILE:
        assert printable(text) in shown
    assert p.run("return window.hacked") is None
    assert p.run("return document.scripts.length") == 3
    assert p.run("return document.querySelectorAll('main img, main b b, #table a').length") == 0


@pytest.mark.parametrize("name", ["large", "huge"])
def test_large_programs_stay_usable(page, name):
    p = page(name)
    n_values = len(p.explanation.values)
    n_groups = len(p.explanation.groups())
    assert p.one("#count").text.startswith(f"{n_values:,} values in {n_groups} groups")
    ActionChains(p.driver).move_to_element(p.one("#chart .u-over")).perform()
    assert numbers_of_step(p) != p.explanation.timeline().peak_step
    p.one("#filter").send_keys("mlp/gelu")
    n_layers = len(p.explanation.segments)
    assert p.one("#count").text.startswith(f"{2 * n_layers:,} values in 2 groups")
    p.run("document.querySelector('#table .expand').click()")
    assert len(p.texts("tr.child")) == 41  # 40 values and the button for more
    assert p.run("return document.querySelectorAll('*').length") < 5000


def test_without_predicted_times_the_axis_counts_steps(page):
    p = page("untimed")
    assert not p.one("#by-time").is_enabled()
    ActionChains(p.driver).move_to_element(p.one("#chart .u-over")).perform()
    assert numbers_of_step(p) == pytest.approx(len(p.explanation.steps) / 2, abs=2)


def test_without_a_timeline_the_rest_is_there(page):
    p = page("bare")
    assert not p.one("#memory").is_displayed()
    assert p.one("#count").text == "0 values in 0 groups"
