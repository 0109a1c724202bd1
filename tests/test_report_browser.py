"""The report in a real browser: quiet, whole, readable at 320 pixels, in both themes, by keyboard and in a frame."""

import html
import shutil
import subprocess

import pytest
from chromium import PROGRAM, Chromium
from report_samples import evaluation, everything, history, provenance, verdict

from trainer.report import render

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on PATH"),
]

LONG = "a class name without any space " + "x" * 120
PAGES = {
    "full": lambda: render(everything(), verdict(), history(), provenance()),
    "refused": lambda: render(evaluation(2), verdict(False), history(1), {}),
    "long names": lambda: render(everything([LONG, f"<b>{LONG}", LONG[::-1]]), verdict(), [], {LONG: {LONG: LONG}}),
    "24 classes": lambda: render(evaluation(24), verdict(), history(300), provenance()),
    "100 classes": lambda: render(evaluation(100), verdict(), history(), provenance()),
}
UNFOLD = "document.querySelectorAll('details').forEach(fold => { fold.open = true; })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, make in PAGES.items():
        (folder / f"{name}.html").write_text(make(), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in PAGES}


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, fetched by npm into a temporary folder."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on PATH to fetch axe-core with")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"npm could not fetch axe-core: {done.stderr.strip()[-200:]}")
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_quiet_and_asks_for_nothing(browser, urls, name):
    tab = browser.open(urls[name])
    assert tab.complaints() == []
    assert tab.requests() == [urls[name].replace(" ", "%20")]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_never_scrolls_sideways_at_320_pixels(browser, urls, name):
    tab = browser.open(urls[name], width=320, height=640)
    tab.ask(UNFOLD)
    assert tab.ask("document.documentElement.scrollWidth") == 320


def test_every_picture_is_there_and_every_drawing_has_lines(browser, urls):
    for name in PAGES:
        tab = browser.open(urls[name])
        pictures = tab.ask("[...document.images].map(image => image.complete && image.naturalWidth > 0)")
        assert pictures
        assert all(pictures)
        drawn = tab.ask("[...document.querySelectorAll('svg.chart')].map(svg => svg.getBBox().width)")
        assert drawn
        assert min(drawn) > 300


def test_the_theme_follows_the_reader(browser, urls):
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert browser.open(urls["full"], scheme="light").ask(ground) == "rgb(255, 255, 255)"
    assert browser.open(urls["full"], scheme="dark").ask(ground) == "rgb(15, 19, 23)"


def test_the_contents_work_by_keyboard(browser, urls):
    tab = browser.open(urls["full"])
    tab.press("Tab")
    tab.press("Tab")
    assert tab.ask("document.activeElement.textContent") == "Metrics"
    tab.press("Enter")
    assert tab.ask("document.activeElement.id") == "metrics-heading"


def test_a_table_wider_than_a_phone_can_be_reached_by_keyboard(browser, urls):
    tab = browser.open(urls["24 classes"], width=320)
    wide = "[...document.querySelectorAll('.scroll')].filter(frame => frame.scrollWidth > frame.clientWidth + 1)"
    assert tab.ask(f"{wide}.length") > 0
    assert tab.ask(f"{wide}.every(frame => frame.tabIndex === 0 && frame.getAttribute('aria-label'))")


def test_folds_open_for_print_and_close_again(browser, urls):
    tab = browser.open(urls["full"])
    closed = "document.querySelectorAll('details:not([open])').length"
    before = tab.ask(closed)
    assert before > 0
    tab.ask("dispatchEvent(new Event('beforeprint'))")
    assert tab.ask(closed) == 0
    tab.ask("dispatchEvent(new Event('afterprint'))")
    assert tab.ask(closed) == before


def test_the_page_works_in_the_sandboxed_frame_of_kubeflow_pipelines(browser, tmp_path):
    page = html.escape(PAGES["full"](), quote=True)
    outer = tmp_path / "outer.html"
    frame = f'<iframe sandbox="allow-scripts" srcdoc="{page}" width="700" height="500"></iframe>'
    outer.write_text(f'<!doctype html><meta charset="utf-8"><title>outer</title>{frame}', encoding="utf-8")
    tab = browser.open(outer.as_uri())
    inside = tab.seen("Runtime.executionContextCreated")[-1]["context"]["id"]
    assert tab.ask("location.href", inside) == "about:srcdoc"
    assert tab.ask("document.querySelector('nav').hidden", inside) is False
    tab.ask("document.querySelector('nav li:last-child button').click()", inside)
    assert tab.ask("document.activeElement.id", inside) == "provenance-heading"
    assert tab.ask("document.documentElement.scrollWidth <= innerWidth", inside)
    assert tab.ask("[...document.images].every(image => image.naturalWidth > 0)", inside)
    assert tab.complaints() == []
    assert set(tab.requests()) <= {outer.as_uri(), "about:srcdoc"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_axe_finds_nothing_to_mend(browser, urls, axe, scheme, width):
    for name in ("full", "refused", "24 classes", "100 classes"):
        tab = browser.open(urls[name], width=width, scheme=scheme)
        tab.ask(UNFOLD)
        tab.ask(axe)
        found = tab.ask(
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})"
            ".then(result => ({passed: result.passes.map(rule => rule.id), violations: result.violations.map("
            "rule => [rule.id, rule.nodes.slice(0, 3).map(node => node.html.slice(0, 200) + node.failureSummary)])}))"
        )
        assert found["violations"] == []
        assert {"color-contrast", "heading-order", "image-alt"} <= set(found["passed"])
