"""The HTML report in a browser: it draws the planner's figures, its sliders pick plans, and it asks for nothing."""

from __future__ import annotations

import io
import json
import re
import shutil

import pytest
from tests.plan.reported import HOSTILE, Report, hostile

from maniple.plan import html_report

webdriver = pytest.importorskip("selenium.webdriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and chromedriver")
WIDE, PHONE = (1280, 900), (390, 844)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return Report(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser, report):
    """The report, newly opened in a wide window; at the end nothing was complained of and nothing asked for."""
    yield opened(browser, report.file)
    quiet(browser)


def opened(browser, file, size=WIDE, scheme="light"):
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what was before is forgotten
    browser.get(file.as_uri())
    return browser


def quiet(browser) -> None:
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # the browser's own first tab may still load its icons
    asked = [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]
    assert asked
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]


def find(page, selector: str):
    return page.find_element("css selector", selector)


def text(page, selector: str) -> str:
    return find(page, selector).get_property("textContent")


def tiles(page) -> dict[str, str]:
    """Of the headline, by name: its figure with its unit."""
    rows = page.find_elements("css selector", "#tiles > div")
    return {text(row, "dt"): text(row, "dd").replace(",", "") for row in rows}


def move(page, axis: int, steps: int) -> None:
    """As a hand on the keyboard does."""
    slider = find(page, f"#axis-{axis}")
    slider.send_keys(("\ue014" if steps > 0 else "\ue012") * abs(steps))


def shows(page, cell: dict, capacity: int) -> None:
    """Headline and bars are those of a cell."""
    said = tiles(page)
    assert float(said["Step time"].split()[0]) == pytest.approx(cell["seconds"], rel=5e-3)
    assert float(said["Tokens/s a GPU"]) == pytest.approx(cell["tgs"], abs=0.51)
    assert float(said["TFLOP/s a GPU"]) == pytest.approx(cell["tflops"], abs=0.51)
    assert said["MFU"] == f"{100 * cell['mfu']:.1f} %"
    assert text(page, "#verdict") == cell["verdict"][0].upper() + cell["verdict"][1:]
    bars = page.execute_script(
        "return [...document.querySelectorAll('#memory-chart g')].map(group =>"
        "[...group.querySelectorAll('[data-kind]')].map(bar => [bar.dataset.kind, Number(bar.getAttribute('width'))]))"
    )
    assert [[kind for kind, _ in bar] for bar in bars] == [list(rank["bytes"]) for rank in cell["ranks"]]
    bars = [dict(bar) for bar in bars]
    scale = sum(bars[0].values()) / sum(cell["ranks"][0]["bytes"].values())
    for bar, rank in zip(bars, cell["ranks"], strict=True):
        assert bar == pytest.approx({kind: scale * size for kind, size in rank["bytes"].items()}, abs=1e-6)
    limit = page.execute_script(
        "const line = document.querySelector('#memory-chart .limit'); return Number(line.getAttribute('x1'))"
        "- Number(document.querySelector('#memory-chart [data-kind]').getAttribute('x'))"
    )
    assert limit == pytest.approx(scale * capacity)
    lines = page.execute_script(
        "return [...document.querySelectorAll('#time-chart .bar')].map(row => [row.querySelector('.name').textContent,"
        "parseFloat(row.querySelector('.fill').style.width)])"
    )
    shown = [(name, seconds) for name, seconds, _ in cell["parts"]]
    assert [name for name, _ in lines][: len(shown)] == [name for name, _ in shown]
    longest = lines[0][1] / shown[0][1]
    assert [width for _, width in lines][: len(shown)] == pytest.approx([longest * s for _, s in shown], rel=1e-3)


def test_it_shows_the_job(page, report):
    assert text(page, "h1") == "qwen3-30b-a3b on 16 × h200-sxm"
    shows(page, report.own, report.data["capacity"])
    assert text(page, "#answer") == "The job as it was given."
    assert page.find_elements("css selector", "#scaling-chart circle")
    assert [row.get_property("textContent") for row in page.find_elements("css selector", "#bends li")] == (
        report.data["scaling"]["bends"]
    )
    cut = page.execute_script(
        "for (const each of document.querySelectorAll('details')) each.open = true;"
        "return [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)"
        ".map(box => box.id)"
    )
    assert cut == []  # no table's last column is out of sight


def test_a_slider_picks_another_plan_of_the_grid(page, report):
    at = [axis["own"] for axis in report.data["axes"]]
    before = tiles(page)
    moved = at.index(0, 2)  # recomputation, micro-batch or imbalance, at its lowest
    move(page, moved, 1)
    at[moved] += 1
    cell = report.cell(at)
    shows(page, cell, report.data["capacity"])
    assert tiles(page) != before
    assert text(page, f"label[for=axis-{moved}] output") == report.data["axes"][moved]["values"][at[moved]]
    assert text(page, "#command") == cell["command"]
    assert page.find_elements("css selector", "#time-chart .was")  # where the job's own is
    assert find(page, "#pipeline .given").is_displayed()
    find(page, "#back").click()
    assert tiles(page) == before


def test_sizes_that_do_not_go_together_say_why(page, report):
    own = [axis["own"] for axis in report.data["axes"]]
    at = [len(report.data["axes"][0]["values"]) - 1, len(report.data["axes"][1]["values"]) - 1, *own[2:]]
    for axis in (0, 1):
        move(page, axis, at[axis] - own[axis])
    cell = report.cell(at)
    assert text(page, "#answer") == f"Cannot run: {cell['why']}"
    assert text(page, "#verdict").startswith("Cannot run")
    assert set(tiles(page).values()) == {"–"}
    assert not find(page, ".command").is_displayed()
    assert text(page, ".slider:nth-child(2) .stops").endswith("×")
    move(page, 1, own[1] - at[1])
    move(page, 0, own[0] - at[0])
    shows(page, report.own, report.data["capacity"])


def test_the_fastest_that_fits_is_a_button_away(page, report):
    find(page, "#best").click()
    axes = report.data["axes"]
    assert axes[-1]["name"] == "Router imbalance"  # which nobody chooses: it stays the job's
    cells = report.data["cells"][axes[-1]["own"] :: len(axes[-1]["values"])]
    best = min((cell for cell in cells if cell.get("fits")), key=lambda cell: cell["seconds"])
    assert best["seconds"] < report.own["seconds"]
    shows(page, best, report.data["capacity"])


def test_a_pass_of_the_pipeline_says_what_it_is(page, report):
    first = report.data["timeline"]["passes"][report.data["timeline"]["ranks"][0][1]]
    page.execute_script(
        "const {left, top} = timeline.canvas.getBoundingClientRect();"
        "const place = {clientX: left + timeline.left + 1, clientY: top + 4};"
        "timeline.canvas.dispatchEvent(new PointerEvent('pointermove', place))"
    )
    said = text(page, "#tip")
    assert said.startswith("rank 0: forward of micro-batch 0, chunk 0\n")
    assert f"token exchange {100 * first['exchange']:.0f}% of it" in said
    whole = page.execute_script("return timeline.to - timeline.from")
    find(page, "[data-do=in]").click()
    assert page.execute_script("return timeline.to - timeline.from") == pytest.approx(whole / 2)
    find(page, "[data-do=all]").click()
    assert page.execute_script("return timeline.to - timeline.from") == pytest.approx(whole)


def test_everything_has_a_name_to_be_read_aloud(page):
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('[role=img], input, button, canvas, table')].filter(element =>"
        "![element.getAttribute('aria-label'), element.textContent, element.labels?.[0]?.textContent]"
        ".some(words => words?.trim()))"
        ".map(element => element.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    find(page, "#axis-3").send_keys("\ue014")
    assert find(page, "#axis-3").get_attribute("aria-valuetext") == text(page, "label[for=axis-3] output")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_can_be_seen_light_and_dark(browser, report, tmp_path, size):
    from PIL import Image

    backgrounds = {}
    for scheme in ("light", "dark"):
        page = opened(browser, report.file, size, scheme)
        inner, outer = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert inner <= outer  # nothing sticks out
        image = Image.open(io.BytesIO(page.get_screenshot_as_png())).convert("RGB")
        image.save(tmp_path / f"{scheme}.png")
        assert image.size == size
        colors = {color: number for number, color in image.getcolors(image.width * image.height)}
        assert len(colors) > 200
        assert max(colors.values()) < 0.9 * image.width * image.height
        paint = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        backgrounds[scheme] = tuple(map(int, re.findall(r"\d+", paint)))
        assert image.getpixel((2, 2)) == backgrounds[scheme]
        for kind in ("weights", "gradients") if size == WIDE else ():
            tone = page.execute_script(
                f"return getComputedStyle(document.querySelector('#memory-chart [data-kind={kind}]')).fill"
            )
            assert colors.get(tuple(map(int, re.findall(r"\d+", tone))), 0) > 50  # a bar of it
    assert sum(backgrounds["light"]) > 650 > 150 > sum(backgrounds["dark"])
    quiet(browser)


def test_names_stay_text(browser, report, tmp_path):
    page = opened(browser, report.file)
    assert page.execute_script("return window.hacked") is None
    assert HOSTILE in text(page, "#command")
    evil = tmp_path / "evil.html"
    words = "<img src=x onerror=window.hacked=1></script><script>window.hacked=2</script>"
    evil.write_text(html_report.page(hostile(report.data, words)), encoding="utf-8")
    page = opened(browser, evil)
    assert page.execute_script("return window.hacked") is None
    assert text(page, "h1") == f"qwen3-30b-a3b{words} on 16 × h200-sxm{words}"
    assert len(page.find_elements("css selector", "script")) == 2
    assert not page.find_elements("css selector", "img")
    quiet(browser)
    # and were a name ever to become a script, the page's policy would not let it run
    evil.write_text(report.text.replace("<main>", "<main><script>window.hacked=3</script>"), encoding="utf-8")
    page = opened(browser, evil)
    assert page.execute_script("return window.hacked") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))
