"""A double of an object store in memory: the part of S3's protocol that pyarrow uses. It checks whose key signed, but
no signature. Runs in threads.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["S3Double"]

_KEY = "key"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class S3Double:
    """`with S3Double() as store:`; `objects` are what is stored, by bucket and name. On a free port, on loopback."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.double = self  # pyright: ignore[reportAttributeAccessIssue]
        self._thread = threading.Thread(target=self._server.serve_forever, name="test-s3", daemon=True)

    def url(self, path: str) -> str:
        """The URL for `pyarrow.fs`."""
        port = self._server.server_address[1]
        return f"s3://{_KEY}:pass%2Fword@bucket/{path}?scheme=http&endpoint_override=127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def _double(self) -> S3Double:
        return self.server.double  # pyright: ignore[reportAttributeAccessIssue]

    def _target(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).lstrip("/"), query

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        if f"Credential={_KEY}/" not in self.headers.get("Authorization", ""):
            status, body = 403, b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = _unchunked(self.rfile)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        # S3's own chunks, with a trailing checksum, may be inside those of HTTP.
        streamed = "STREAMING" in self.headers.get("x-amz-content-sha256", "")
        return _unchunked(io.BytesIO(body)) if streamed else body

    def do_PUT(self) -> None:
        name, query = self._target()
        body = self._body()
        if "uploadId" in query:
            self._double.parts[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self._double.objects[name] = body
        self._answer(200, ETag=_tag(body))

    def do_POST(self) -> None:
        name, query = self._target()
        self._body()
        if "uploads" in query:
            upload = str(len(self._double.parts))
            self._double.parts[upload] = {}
            made = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        else:
            parts = self._double.parts[query["uploadId"]]
            # An object appears as a whole or not at all.
            self._double.objects[name] = b"".join(parts[number] for number in sorted(parts))
            made = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        self._answer(200, made.encode())

    def do_DELETE(self) -> None:
        self._double.objects.pop(self._target()[0], None)
        self._answer(204)

    def do_HEAD(self) -> None:
        body = self._double.objects.get(self._target()[0])
        if body is None:
            self._answer(404 if "/" in self._target()[0].rstrip("/") else 200)
        else:
            self._answer(200, Content_Length=str(len(body)), ETag=_tag(body), Last_Modified=formatdate(usegmt=True))

    def do_GET(self) -> None:
        name, query = self._target()
        if "/" not in name.rstrip("/"):
            self._answer(200, self._listed(name.rstrip("/"), query).encode(), Content_Type="application/xml")
            return
        body = self._double.objects.get(name)
        if body is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, body, ETag=_tag(body))
        else:
            end = int(wanted[2]) + 1 if wanted[2] else len(body)
            self._answer(206, body[int(wanted[1]) : end], ETag=_tag(body))

    def _listed(self, bucket: str, query: dict[str, str]) -> str:
        prefix, mark = query.get("prefix", ""), query.get("delimiter", "")
        found: list[str] = []
        folders: set[str] = set()
        for place, body in sorted(self._double.objects.items()):
            name = place.removeprefix(f"{bucket}/")
            if not name.startswith(prefix):
                continue
            if mark and mark in name[len(prefix) :]:
                folders.add(prefix + name[len(prefix) :].partition(mark)[0] + mark)
                continue
            found.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(body)}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        count = len(found) + len(folders)
        return (
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{''.join(found)}{common}</ListBucketResult>"
        )


def _unchunked(file: io.BufferedIOBase) -> bytes:
    found: list[bytes] = []
    while size := int(file.readline().partition(b";")[0], 16):
        found.append(file.read(size))
        file.readline()
    while file.readline().strip():
        pass
    return b"".join(found)


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
