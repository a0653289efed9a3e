"""A web server on this machine that gives files, and fails as tests ask it to."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What is served, and how. ``breaks``: after how many bytes of an answer the connection ends, one an answer."""

    files: dict[str, bytes]
    url: str = ""
    tag: str | None = '"one"'
    date: str | None = None
    ranges: bool = True
    lengths: bool = True
    breaks: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    pause_s: float = 0.0
    shift: int = 0
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
            name = self.path.lstrip("/")
            site.asked.append((name, wanted, condition))
            code = site.codes.pop(0) if site.codes else 200
            if code != 200 or name not in site.files:
                self.send_error(code if code != 200 else 404)
                return
            content, start = site.files[name], 0
            if site.ranges and wanted and condition in (site.tag, site.date):
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) + site.shift
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            for header, value in (("ETag", site.tag), ("Last-Modified", site.date)):
                if value is not None:
                    self.send_header(header, value)
            if site.lengths:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = start + site.breaks.pop(0) if site.breaks else len(content)
            self._write(content[start:end])

        def _write(self, content: bytes) -> None:
            size = len(content) if not site.pause_s else max(1, len(content) // 4)
            for at in range(0, len(content), size):
                time.sleep(site.pause_s)
                try:
                    self.wfile.write(content[at : at + size])
                    self.wfile.flush()
                except OSError:
                    return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
