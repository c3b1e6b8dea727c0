"""Models of the Hugging Face hub, from a hub that runs here."""

import http.server
import json
import pathlib
import threading

import pytest

from bpd_jax.formats.hub import is_hub_name
from tests.commands import Script

GOLDEN = pathlib.Path(__file__).parent / "golden" / "llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.is_file()}
LOAD = """
import sys
from bpd_jax import api
from bpd_jax.base import cli
with cli.exit_on_errors():
    lm = api.load(sys.argv[1])
    print(lm.name, lm.config.trunk.num_layers)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `tiny/llama`; all others are missing."""

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def _answer(self):
        path = self.path.partition("?")[0]
        headers, body = {}, None
        if path.startswith("/api/models/tiny/llama/revision/"):
            body = json.dumps({"id": "tiny/llama", "sha": COMMIT}).encode()
        elif path.startswith("/api/models/tiny/llama/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{i:040x}"}
                for i, (name, data) in enumerate(FILES.items())
            ]
            body = json.dumps(rows).encode()
        elif path.startswith(f"/tiny/llama/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            body = FILES.get(name)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        if body is None:
            headers, body = {"X-Error-Code": "RepoNotFound"}, b"{}"
            self.send_response(404)
        else:
            self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def load(tmp_path):
    """Loads a model by its name in a new process; returns its output."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "load.py").write_text(LOAD)

    def run(name, **environment):
        variables = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        }
        script = Script(
            tmp_path / "load.py", name, folder=tmp_path, environment=variables
        )
        return script.wait(timeout=120)

    yield run
    server.shutdown()


def test_a_model_is_downloaded_once_and_then_found_offline(load):
    first = load("tiny/llama")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "llama 2\n"
    assert "from the Hugging Face hub" in first.stderr
    again = load("tiny/llama@main", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr


def test_what_is_missing_is_one_sentence(load):
    for name, environment, words in (
        ("tiny/nothing", {}, "there is none of this name"),
        ("tiny/llama", {"HF_HUB_OFFLINE": "1"}, "cannot be reached"),
    ):
        result = load(name, **environment)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        [error] = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
        assert name in error
        assert words in error


def test_the_library_is_named_where_it_is_missing(load, monkeypatch, tmp_path):
    hidden = "import sys\nsys.modules['huggingface_hub'] = None\n"
    (tmp_path / "load.py").write_text(hidden + LOAD)
    assert "pip install huggingface_hub." in load("tiny/llama").stderr


def test_paths_are_no_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-0.5B-Instruct")
    assert is_hub_name("org/name/file.Q4_1.gguf@main")
    for name in ("models/typo", "runs/typo", "/org/name", "../org/name", "a/b/c", "a"):
        assert not is_hub_name(name)
