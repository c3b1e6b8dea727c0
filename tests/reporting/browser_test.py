"""The page in a real browser, where one is installed."""

import re
import shutil
import struct
import subprocess

import pytest

from bpd_jax.reporting.html import write_html

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def path(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(report, path)
    return path


def browse(path, tmp_path, *flags, address=""):
    """Loads the page in a fresh profile without network; returns what is printed."""
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            *flags,
            f"{path.as_uri()}{address}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def visible_articles(document):
    """Returns (prompt, method, inner HTML) of every article that is not hidden."""
    found = re.findall(r"<article ([^>]*)>(.*?)</article>", document, re.DOTALL)
    return [
        (
            re.search('data-prompt="([^"]*)"', attributes)[1],
            re.search('data-method="([^"]*)"', attributes)[1],
            inner,
        )
        for attributes, inner in found
        if "hidden" not in attributes
    ]


def test_script_runs_and_shows_the_best_method_of_the_first_prompt(path, tmp_path):
    result = browse(path, tmp_path, "--enable-logging=stderr", "--dump-dom")
    assert re.search('<html[^>]* data-ready="true"', result.stdout)
    assert "CONSOLE" not in result.stderr
    [(prompt, method, inner)] = visible_articles(result.stdout)
    assert (prompt, method) == ("0", "ngram_p")
    assert '<ins class="certain">' in inner
    assert "<ins>" in inner
    assert "<del>" in inner


def test_the_address_chooses_prompt_and_method(path, tmp_path, report):
    result = browse(path, tmp_path, "--dump-dom", address="#prompt=2&method=bpd")
    [(prompt, method, inner)] = visible_articles(result.stdout)
    assert (prompt, method) == ("2", "bpd")
    [record] = [
        record
        for record in report.records
        if (record.prompt_index, record.method) == (2, "bpd")
    ]
    accepted = sum(step.accepted for step in record.steps)
    rejected = sum(len(step.draft) - step.accepted for step in record.steps)
    assert inner.count("</ins>") == accepted
    assert inner.count("</del>") == rejected
    assert "&lt;/script&gt;" in re.sub("</?mark[^>]*>", "", inner)


@pytest.mark.parametrize("width, scheme", [(1200, 1), (390, 0)])
def test_screenshot(path, tmp_path, width, scheme):
    picture = tmp_path / "page.png"
    browse(
        path,
        tmp_path,
        f"--window-size={width},1400",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={picture}",
    )
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (width, 1400)
    # An empty page of this size has a few kilobytes.
    assert len(data) > 40_000
