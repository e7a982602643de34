"""The report as people meet it: in a real browser, light and dark, narrow and wide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arena.reports.report import publish
from tests.arena.reports.browser import CHROMIUM, Browser, Seen
from tests.arena.reports.synthetic import synthetic_race

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)")

WIDTHS = (360, 768, 1024, 1600)

# Every text's colour against the first ground behind it that is not see-through, by the formula of WCAG 2.2.
CONTRASTS = """(() => {
  const numbers = css => css.match(/[\\d.]+/g).map(Number);
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = {}, walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  for (let text; text = walker.nextNode();) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.textContent.trim() || node.closest("title") || node.tagName === "TITLE") continue;
    const inSvg = node.namespaceURI.endsWith("svg");
    const a = light(numbers(inSvg ? style.fill : style.color)), b = light(ground(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    texts++;
    if (ratio < 4.5) poor[node.tagName + "." + node.getAttribute("class")] = ratio;
  }
  return {texts, poor};
})()"""

# Marks of the charts against the ground of their card: 3 to 1 for what is not text.
MARKS = CONTRASTS.replace(
    CONTRASTS[CONTRASTS.index("const poor") : CONTRASTS.index("return {texts")],
    """const poor = {}; let texts = 0;
  for (const node of document.querySelectorAll("figure .dot > *, figure .line, .track > div")) {
    const style = getComputedStyle(node), inSvg = node.namespaceURI.endsWith("svg");
    const a = light(numbers(inSvg ? style.stroke : style.backgroundColor)), b = light(ground(node.parentElement));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    texts++;
    if (ratio < 3) poor[node.tagName + "." + node.getAttribute("class") + node.parentElement.className] = ratio;
  }
  """,
)

# Everything that sticks out of the page, and every text that is wider than the box it stands in.
OVERFLOWS = """[...document.body.querySelectorAll("*")].filter(node => {
  if (node.closest(".skip, .hidden, thead") || node.closest("svg") && node.tagName !== "svg") return false;
  const box = node.getBoundingClientRect(), style = getComputedStyle(node);
  return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5 || node.scrollWidth > node.clientWidth + 1
    && style.display !== "inline" && node.clientWidth);
}).map(node => node.tagName + "." + node.getAttribute("class") + " " + node.textContent.slice(0, 40))"""

# Text of a chart that is cut off at the edge of its picture.
CUT = """[...document.querySelectorAll("figure svg text")].filter(text => {
  const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
  return box.x < -0.5 || box.x + box.width > view.width + 0.5 || box.y < -0.5 || box.y + box.height > view.height + 0.5;
}).map(text => text.textContent)"""

UNFOLD = "document.querySelectorAll('details').forEach(details => details.open = true)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    publish(synthetic_race(quick=True), folder)
    return folder / "report.html"


@pytest.fixture(scope="module", params=[(width, is_dark) for width in WIDTHS for is_dark in (False, True)], ids=str)
def seen(browser: Browser, page: Path, request: pytest.FixtureRequest) -> Iterator[Seen]:
    width, is_dark = request.param
    with browser.look_at(page, width=width, is_dark=is_dark) as looked:
        yield looked


def test_nothing_sticks_out_no_text_is_faint_and_nothing_is_asked_of_a_network(seen: Seen, page: Path) -> None:
    seen.evaluate(UNFOLD)
    assert seen.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert seen.evaluate(OVERFLOWS) == []
    assert seen.evaluate(CUT) == []
    contrast = seen.evaluate(CONTRASTS)
    assert contrast["texts"] > 500
    assert contrast["poor"] == {}
    assert seen.evaluate(MARKS)["poor"] == {}
    assert seen.requests == [page.as_uri()]
    assert seen.complaints == []


def test_every_picture_has_a_size_and_words(seen: Seen) -> None:
    pictures = seen.evaluate(
        "[...document.querySelectorAll('figure svg')].map(svg => "
        "[svg.clientWidth, svg.clientHeight, svg.getAttribute('aria-label').length])"
    )
    assert len(pictures) == 21  # five by rate, three distributions, three for each engine, and one of a tuning
    for width, height, words in pictures:
        assert width > 240
        assert height > 160
        assert words > 30


def test_light_and_dark_are_two_dresses_of_one_page(browser: Browser, page: Path) -> None:
    grounds = []
    for is_dark in (False, True):
        with browser.look_at(page, width=800, is_dark=is_dark) as looked:
            grounds.append(looked.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


def test_the_keyboard_reaches_the_ranking_and_every_fold(browser: Browser, page: Path) -> None:
    with browser.look_at(page, width=1024) as looked:
        ring = looked.evaluate(
            "(() => { const link = document.querySelector('.skip'); link.focus({focusVisible: true}); "
            "return [link.getBoundingClientRect().height > 20, getComputedStyle(link).outlineStyle]; })()"
        )
        assert ring == [True, "solid"]
        missing = looked.evaluate(
            "[...document.querySelectorAll('nav a, .skip')].map(a => a.hash.slice(1))"
            ".filter(id => !document.getElementById(id))"
        )
        assert missing == []
        assert looked.evaluate("[...document.querySelectorAll('summary')].every(node => node.tabIndex === 0)")


def test_a_fault_on_a_page_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    """The looking itself is tested: a page with every fault that is looked for."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><body style='background:#fff;margin:0'><p style='color:#bbb;width:2000px'>faint and wide</p>"
        "<img src='http://127.0.0.1:1/x.png'><figure><svg viewBox='0 0 50 50' width='50' height='50'>"
        "<text x='40' y='20'>cut off here</text></svg></figure><script>console.error('no')</script>"
    )
    with browser.look_at(bad, width=800) as looked:
        assert looked.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert looked.evaluate(OVERFLOWS)
        assert looked.evaluate(CUT) == ["cut off here"]
        assert looked.evaluate(CONTRASTS)["poor"]
        assert len(looked.requests) == 2
        assert looked.complaints
