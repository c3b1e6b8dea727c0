"""The page in a headless browser: interaction, layout, errors and requests."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

from bpd_jax.reporting.page import write_page

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

# The browser reads commands from descriptor 3 and writes to 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-pipe",
]  # fmt: skip
SECONDS = 60
KEYS = {"ArrowLeft": 37, "ArrowRight": 39}


class Browser:
    """A minimal client of the DevTools protocol, over a pipe."""

    def __init__(self, profile):
        input_end, self._out = os.pipe()
        self._in, output_end = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", LAUNCH, str(input_end), str(output_end),
                BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(input_end, output_end),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(input_end)
        os.close(output_end)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._out)
        os.close(self._in)

    def _read(self):
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, expression):
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address, width=1440, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        # The same file with another hash would not be loaded again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def wait(self, expression):
        deadline = time.monotonic() + SECONDS
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def click(self, selector):
        x, y = self.run(
            f"(() => {{const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=x, y=y, button="left", clickCount=1,
            )  # fmt: skip

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEYS[key],
            )

    def complaints(self):
        """Errors and warnings that the page gave, violated policies included."""
        self.run("1")
        return [
            event["params"]
            for event in self.events
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
            or (
                event["method"] == "Runtime.consoleAPICalled"
                and event["params"]["type"] in ("error", "warning", "assert")
            )
        ]

    def addresses(self):
        """The URLs that the page requested, by network or from the disk."""
        self.run("1")
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        }


@pytest.fixture(scope="module")
def page(paper_report, tmp_path_factory):
    path = tmp_path_factory.mktemp("paper") / "report.html"
    write_page(paper_report, path)
    return path.as_uri()


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(one_browser, page):
    """Checks afterwards that there were no errors, and only the page was requested."""
    one_browser.events.clear()
    yield one_browser
    assert one_browser.complaints() == []
    requested = {url.partition("#")[0] for url in one_browser.addresses()}
    assert requested <= {page, "about:blank"}


def tokens(browser, selector):
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        ".map((token) => token.textContent)"
    )


def displayed_tokens(text, indices):
    pieces = (text.pieces[index].replace("\u202e", "\\u202e") for index in indices)
    signs = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "·"})
    return [piece.translate(signs) or "∅" for piece in pieces]


def assert_call(browser, text, trace, step):
    """Checks the displayed call: position, draft, lattice and scores."""
    calls = text.traces[trace]["calls"]
    call = calls[step]
    where = browser.run("document.getElementById('where').textContent")
    position = f"Call {step + 1} of {len(calls)} · token {call['at'] + 1} of "
    assert where.startswith(position)
    draft = "#call .drafted .draft:nth-of-type(1)"
    accepted, winner = call["accepted"], call["winner"]
    assert tokens(browser, f"{draft} ins") == displayed_tokens(text, winner[:accepted])
    assert tokens(browser, f"{draft} del") == displayed_tokens(text, winner[accepted:])
    assert browser.run("document.querySelectorAll('#call .node.kept').length") == (
        accepted
    )
    lattice = sum(map(len, text.candidates[call["at"]])) + 1
    nodes = "document.querySelectorAll('#call .node:not(.outside)').length"
    assert browser.run(nodes) == lattice
    verdicts = ["accepted"] * (accepted - 1) + ["rejected"] * (len(winner) - accepted)
    assert tokens(browser, "#call .scores td:last-child") == ["certain", *verdicts]
    total = sum(
        text.log_probs[call["at"]][head][text.candidates[call["at"]][head].index(token)]
        for head, token in enumerate(winner[1:])
    )
    [displayed_total] = tokens(browser, "#call .scores tr:last-child td:nth-child(5)")
    assert float(displayed_total.replace("−", "-")) == pytest.approx(total, abs=0.01)


def test_explorer_steps_through_calls_methods_and_texts(browser, page, paper_report):
    browser.open(page)
    first, second = paper_report.texts[:2]
    assert_call(browser, first, 0, 0)
    browser.click("#next")
    assert_call(browser, first, 0, 1)
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert_call(browser, first, 0, 2)
    browser.click("#last")
    browser.press("ArrowRight")
    assert_call(browser, first, 0, len(first.traces[0]["calls"]) - 1)
    assert browser.run("document.getElementById('next').ariaDisabled") == "true"
    browser.click("#first")
    # Another method, by a click on its name, and another text.
    browser.click("#contenders label:nth-child(2)")
    assert_call(browser, first, 1, 0)
    browser.run(
        "(() => {const list = document.getElementById('text'); list.value = '1';"
        "list.dispatchEvent(new Event('change', {bubbles: true}))})()"
    )
    browser.click("#next")
    assert_call(browser, second, 1, 1)
    assert browser.run("location.hash") == ("#explore=squad/4/ngram%3A16%40general_2/2")
    assert tokens(browser, "#call .text .given") == [second.prompt]
    # Markup in tokens is not rendered.
    assert browser.run("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("width, height", [(390, 844), (1440, 900)])
def test_content_fits_into_the_viewport(browser, page, width, height):
    browser.open(page, width, height)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    # Texts of charts lie inside their drawings.
    outside = browser.run(
        "[...document.querySelectorAll('svg.plot')].flatMap((svg) => {"
        "const box = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('text')].filter((text) => {"
        "const b = text.getBoundingClientRect();"
        "return b.left < box.left - 1 || b.right > box.right + 1"
        " || b.top < box.top - 1 || b.bottom > box.bottom + 1;"
        "}).map((text) => text.textContent)})"
    )
    assert outside == []
