"""A storage server for tests: the part of Cloud Storage's JSON API that we use.

Objects are kept in memory, with generations, preconditions, checksums, ranges and
uploads in several requests. A test can read `requests`, change `objects`, and intercept
uploads with `before_upload`, which drops an upload by raising `ConnectionError`.
"""

import base64
import dataclasses
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c

OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)$")
LISTING = re.compile(r"/storage/v1/b/([^/]+)/o$")
BUCKET = re.compile(r"/storage/v1/b/([^/]+)$")
UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o$")


@dataclasses.dataclass
class Stored:
    """An object; `reported` is the size that its description states."""

    data: bytes
    generation: int
    reported: int


class FakeStorage:
    """Buckets in memory and a server for them; a context manager."""

    def __init__(self, *buckets: str) -> None:
        self.objects: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.requests: list[str] = []
        self.before_upload: Callable[[str], None] = lambda name: None
        self.lock = threading.RLock()
        self.sessions: dict[str, tuple[str, dict, bytearray]] = {}
        self._numbers: Iterator[int] = itertools.count(1_700_000_000_000_000)
        handler = type("Handler", (_Handler,), {"storage": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeStorage":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def clear(self) -> None:
        """Empties the buckets, and forgets requests and hooks."""
        for objects in self.objects.values():
            objects.clear()
        self.requests.clear()
        self.before_upload = lambda name: None

    def put(self, bucket: str, name: str, data: bytes) -> Stored:
        """Stores an object under a new generation."""
        stored = Stored(data, next(self._numbers), len(data))
        self.objects[bucket][name] = stored
        return stored

    def downloads(self) -> list[str]:
        """Names of the objects whose content was requested, in order."""
        names = []
        for request in self.requests:
            path, _, query = request.partition(" ")[2].partition("?")
            match = OBJECT.match(path)
            if match and request.startswith("GET") and "alt=media" in query:
                names.append(urllib.parse.unquote(match[2]))
        return names


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and content are two packets: by default the second one would wait until
    # the client has acknowledged the first, which it delays by 40 ms.
    disable_nagle_algorithm = True
    storage: FakeStorage

    def log_message(self, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # A client that was killed.
            self.close_connection = True

    def _do(self) -> None:
        self.storage.requests.append(f"{self.command} {self.path}")
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self._body()
        if self.command in ("POST", "PUT") and (match := UPLOAD.match(url.path)):
            self._upload(match[1], query, body)
            return
        with self.storage.lock:
            if match := OBJECT.match(url.path):
                self._object(match[1], urllib.parse.unquote(match[2]), query)
            elif match := LISTING.match(url.path):
                self._listing(match[1], query)
            elif (match := BUCKET.match(url.path)) and match[1] in self.storage.objects:
                self._json(200, {"kind": "storage#bucket", "name": match[1]})
            else:
                self._error(404, "Not Found")

    do_GET = do_POST = do_PUT = do_DELETE = _do

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> None:
        stored = self.storage.objects.get(bucket, {}).get(name)
        generation = query.get("generation")
        if stored is None or generation not in (None, str(stored.generation)):
            self._error(404, f"No such object: {bucket}/{name}")
            return
        if query.get("ifGenerationMatch") not in (None, str(stored.generation)):
            self._error(412, "conditionNotMet")
        elif query.get("ifGenerationNotMatch") == str(stored.generation):
            self._send(304, b"")
        elif self.command == "DELETE":
            del self.storage.objects[bucket][name]
            self._send(204, b"")
        elif query.get("alt") == "media":
            self._media(stored)
        else:
            self._json(200, _description(bucket, name, stored))

    def _media(self, stored: Stored) -> None:
        headers = {
            "X-Goog-Hash": f"crc32c={_crc(stored.data)},md5={_md5(stored.data)}",
            "X-Goog-Generation": str(stored.generation),
            "Content-Type": "application/octet-stream",
        }
        match = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        if not match:
            self._send(200, stored.data, headers)
            return
        size = len(stored.data)
        begin, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
        if begin >= size:
            self._error(416, "Requested Range Not Satisfiable")
            return
        headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
        self._send(206, stored.data[begin : end + 1], headers)

    def _listing(self, bucket: str, query: dict[str, str]) -> None:
        if bucket not in self.storage.objects:
            self._error(404, "The specified bucket does not exist.")
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        entries: dict[str, bool] = {}
        for name in sorted(self.storage.objects[bucket]):
            if name.startswith(prefix):
                head, separator, _ = name[len(prefix) :].partition(delimiter or "\0")
                entries[prefix + head + separator if separator else name] = bool(
                    separator
                )
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [
                _description(bucket, name, self.storage.objects[bucket][name])
                for name, is_folder in entries.items()
                if not is_folder
            ],
            "prefixes": [name for name, is_folder in entries.items() if is_folder],
        }
        self._json(200, answer)

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        kind = query.get("uploadType")
        if kind == "resumable" and "upload_id" in query:
            name, first, data = self.storage.sessions[query["upload_id"]]
            data += body
            total = (self.headers.get("Content-Range") or "").rpartition("/")[2]
            if total == "*" or (total.isdigit() and len(data) < int(total)):
                self._send(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})
                return
            self._store(bucket, name, bytes(data), first)
        elif kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            session = hashlib.md5(f"{name}{len(self.storage.sessions)}".encode())
            self.storage.sessions[session.hexdigest()] = (name, query, bytearray())
            path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id="
            location = f"{self.storage.url}{path}{session.hexdigest()}"
            self._send(200, b"", {"Location": location})
        elif kind == "multipart":
            # Metadata and data, as gcsfs writes them.
            _, metadata, rest = body.split(b"--==0==", 2)
            data = rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
            name = json.loads(metadata.partition(b"\n\n")[2])["name"]
            self._store(bucket, name, data, query)
        else:
            self._store(bucket, query["name"], body, query)

    def _store(
        self, bucket: str, name: str, data: bytes, query: dict[str, str]
    ) -> None:
        self.storage.before_upload(name)
        with self.storage.lock:
            if bucket not in self.storage.objects:
                self._error(404, "The specified bucket does not exist.")
                return
            current = self.storage.objects[bucket].get(name)
            generation = str(current.generation if current else 0)
            if query.get("ifGenerationMatch") not in (None, generation):
                self._error(412, "conditionNotMet")
                return
            stored = self.storage.put(bucket, name, data)
            self._json(200, _description(bucket, name, stored))

    def _error(self, code: int, message: str) -> None:
        self._json(code, {"error": {"code": code, "message": message}})

    def _json(self, code: int, content: object) -> None:
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        self._send(code, json.dumps(content).encode(), headers)

    def _send(
        self, code: int, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _crc(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def _description(bucket: str, name: str, stored: Stored) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{stored.generation}",
        "name": name,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(stored.reported),
        "md5Hash": _md5(stored.data),
        "crc32c": _crc(stored.data),
        "timeCreated": "2026-01-01T00:00:00.000Z",
        "updated": "2026-01-01T00:00:00.000Z",
        "storageClass": "STANDARD",
    }
