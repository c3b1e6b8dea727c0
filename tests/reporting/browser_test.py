"""The page in a headless browser: interaction, layout, errors and requests."""

import html
import json
import re
import shutil
import subprocess

import pytest

from bpd_jax.reporting.page import write_page

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom",
]  # fmt: skip

# Shows the page in a frame, runs the steps of a test and writes what they return.
DRIVER = """<!doctype html><meta charset="utf-8">
<iframe style="border: 0; width: WIDTHpx; height: HEIGHTpx" src="ADDRESS"></iframe>
<pre></pre>
<script>
const frame = document.querySelector("iframe");
let page, view;
const all = (selector) => [...page.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((element) => element.textContent);
function click(selector) {
  const element = page.querySelector(selector);
  element.scrollIntoView({block: "center", behavior: "instant"});
  const box = element.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const event = new view.MouseEvent("click", {bubbles: true, cancelable: true});
  page.elementFromPoint(x, y).dispatchEvent(event);
}
function press(key) {
  const event = new view.KeyboardEvent("keydown", {key, bubbles: true});
  (page.activeElement || page.body).dispatchEvent(event);
}
function shown() {
  const draft = "#call .drafted .draft:nth-of-type(1)";
  return {
    where: page.getElementById("where").textContent,
    accepted: texts(`${draft} ins`),
    rejected: texts(`${draft} del`),
    kept: all("#call .node.kept").length,
    nodes: all("#call .node:not(.outside)").length,
    verdicts: texts("#call .scores td:last-child"),
    total: texts("#call .scores tr:last-child td:nth-child(5)"),
  };
}
frame.addEventListener("load", () => {
  [page, view] = [frame.contentDocument, frame.contentWindow];
  if (page.documentElement.dataset.ready !== "true") throw new Error("not ready");
  document.querySelector("pre").textContent = JSON.stringify((() => {STEPS})());
});
</script>
"""


@pytest.fixture(scope="module")
def page(paper_report, tmp_path_factory):
    path = tmp_path_factory.mktemp("paper") / "report.html"
    write_page(paper_report, path)
    return path.as_uri()


@pytest.fixture
def run(page, tmp_path):
    """A function that runs the steps of a test on the page, and returns their result.

    It checks that nothing was written to the console: no error, and no request that the
    page's policy forbids.
    """

    def run_steps(steps, width=1440, height=900, fragment=""):
        driver = tmp_path / "driver.html"
        text = DRIVER.replace("STEPS", steps).replace("ADDRESS", page + fragment)
        text = text.replace("WIDTH", str(width)).replace("HEIGHT", str(height))
        driver.write_text(text, encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [BROWSER, *FLAGS, profile, driver.as_uri()],
            timeout=120,
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        result = re.search(r"<pre>(.+)</pre>", done.stdout)
        assert result, "the steps did not end"
        return json.loads(html.unescape(result[1]))

    return run_steps


def displayed_tokens(text, indices):
    pieces = (text.pieces[index].replace("\u202e", "\\u202e") for index in indices)
    signs = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "·"})
    return [piece.translate(signs) or "∅" for piece in pieces]


def assert_call(shown, text, trace, step):
    """Checks the displayed call: position, draft, lattice and scores."""
    calls = text.traces[trace]["calls"]
    call = calls[step]
    position = f"Call {step + 1} of {len(calls)} · token {call['at'] + 1} of "
    assert shown["where"].startswith(position)
    accepted, winner = call["accepted"], call["winner"]
    assert shown["accepted"] == displayed_tokens(text, winner[:accepted])
    assert shown["rejected"] == displayed_tokens(text, winner[accepted:])
    assert shown["kept"] == accepted
    assert shown["nodes"] == sum(map(len, text.candidates[call["at"]])) + 1
    verdicts = ["accepted"] * (accepted - 1) + ["rejected"] * (len(winner) - accepted)
    assert shown["verdicts"] == ["certain", *verdicts]
    total = sum(
        text.log_probs[call["at"]][head][text.candidates[call["at"]][head].index(token)]
        for head, token in enumerate(winner[1:])
    )
    [displayed_total] = shown["total"]
    assert float(displayed_total.replace("−", "-")) == pytest.approx(total, abs=0.01)


def test_explorer_steps_through_calls_methods_and_texts(run, paper_report):
    first, second = paper_report.texts[:2]
    calls, last, given, fragment, images = run("""
        const calls = [shown()];
        click("#next");
        calls.push(shown());
        for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"]) press(key);
        calls.push(shown());
        click("#last");
        press("ArrowRight");
        calls.push(shown());
        const last = page.getElementById("next").ariaDisabled;
        click("#first");
        // Another method, by a click on its name, and another text.
        click("#contenders label:nth-child(2)");
        calls.push(shown());
        const list = page.getElementById("text");
        list.value = "1";
        list.dispatchEvent(new view.Event("change", {bubbles: true}));
        click("#next");
        calls.push(shown());
        const given = texts("#call .text .given");
        return [calls, last, given, view.location.hash, all("img").length];
    """)
    steps = [(0, 0), (0, 1), (0, 2), (0, len(first.traces[0]["calls"]) - 1), (1, 0)]
    for call, (trace, step) in zip(calls[:-1], steps, strict=True):
        assert_call(call, first, trace, step)
    assert_call(calls[-1], second, 1, 1)
    assert last == "true"
    assert fragment == "#explore=squad/4/ngram%3A16%40general_2/2"
    assert given == [second.prompt]
    assert images == 0  # Markup in tokens is not rendered.


def test_url_fragment_opens_a_call(run, paper_report):
    call, text, contender = run(
        """
        const chosen = page.querySelector("#contenders :checked").value;
        return [shown(), page.getElementById("text").value, chosen];
        """,
        fragment="#explore=xsum/2/oracle/3",
    )
    assert_call(call, paper_report.texts[2], 2, 2)
    assert (text, contender) == ("2", "2")
    for unknown in ("#explore=nowhere/1/bpd/2", "#explore=%E0%A4%A"):
        call = run("return shown();", fragment=unknown)
        assert_call(call, paper_report.texts[0], 0, 0)


@pytest.mark.parametrize("width, height", [(390, 844), (1440, 900)])
def test_content_fits_into_the_viewport(run, width, height):
    steps = """
        // Texts of charts lie inside their drawings.
        const outside = all("svg.plot").flatMap((svg) => {
          const box = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter((text) => {
            const b = text.getBoundingClientRect();
            return b.left < box.left - 1 || b.right > box.right + 1
              || b.top < box.top - 1 || b.bottom > box.bottom + 1;
          }).map((text) => text.textContent);
        });
        return [view.innerWidth, page.documentElement.scrollWidth, outside];
    """
    inner, content, outside = run(steps, width, height)
    assert inner == width >= content
    assert outside == []


@pytest.mark.parametrize("width, height", [(390, 844), (1440, 900)])
def test_the_menu_of_a_narrow_page_closes_when_it_was_used(run, width, height):
    steps = """
        const menu = page.querySelector(".menu");
        if (view.getComputedStyle(menu).display === "none") return "sidebar";
        click(".menu summary");
        const opened = menu.open;
        click(".menu a[href='#figure4']");
        return [opened, menu.open];
    """
    assert run(steps, width, height) == ([True, False] if width == 390 else "sidebar")
