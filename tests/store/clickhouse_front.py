"""ClickHouse's HTTP interface before the real engine, embedded (chdb): ``python clickhouse_front.py DIRECTORY [PORT]``.

What rlwatch's client asks of a server is passed on as it stands; users, clusters and the gathering of inserts are not
there. Prints its port once it answers. A user ``locked`` has the password ``s3cret``; all others need none.
While there is a file ``twice`` in the directory, every insert is carried out twice.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import chdb

INSERT = re.compile(r"\s*(INSERT\s+INTO\s.*?)\s+FORMAT\s+(\w+)\s*$", re.IGNORECASE | re.DOTALL)
CODE = re.compile(r"Code: (\d+)")


class Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine, guard, scratch = None, threading.Lock(), ""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.answer(200, b"Ok.\n")

    def do_POST(self) -> None:
        asked = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        body = self.body()
        user, _, password = base64.b64decode(self.headers.get("Authorization", "").partition(" ")[2]).partition(b":")
        if user == b"locked" and password != b"s3cret":
            self.refuse("Code: 516. DB::Exception: locked: Authentication failed: password is incorrect. (X)", 403)
            return
        try:
            with self.guard:
                found = self.carried_out(asked, body)
        except Exception as error:
            self.refuse(str(error), 500)
        else:
            self.answer(200, found)

    def carried_out(self, asked: dict[str, str], body: bytes) -> bytes:
        """The engine's answer."""
        if "database" in asked:
            self.engine.query(f"USE `{asked['database']}`")
        head, _, rows_of = body.partition(b"\n")
        statement, body = (asked["query"], body) if "query" in asked else (head.decode(errors="replace"), rows_of)
        insert = INSERT.fullmatch(statement)
        if insert is None:
            text = f"{statement}\n{body.decode()}"
            return self.engine.query(text, "TabSeparated").bytes() or b""
        with tempfile.NamedTemporaryFile(dir=self.scratch) as rows:
            rows.write(body)
            rows.flush()
            for _ in range(2 if Path(self.scratch, "twice").exists() else 1):
                self.engine.query(f"{insert[1]} FROM INFILE '{rows.name}' FORMAT {insert[2]}")
        return b""

    def body(self) -> bytes:
        """Unpacked."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            raw = b"".join(parts)
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        packed = self.headers.get("Content-Encoding", "")
        if packed == "lz4":
            import lz4.frame

            return lz4.frame.decompress(raw)
        if packed == "zstd":
            from backports import zstd

            return zstd.decompress(raw)
        return gzip.decompress(raw) if packed == "gzip" else raw

    def refuse(self, said: str, status: int) -> None:
        code = CODE.search(said)
        self.answer(status, said.encode(), {"X-ClickHouse-Exception-Code": code[1] if code else "1002"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        said = {"Content-Length": str(len(body)), "X-ClickHouse-Summary": json.dumps({}), **(headers or {})}
        for name, value in said.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(body)


def main(directory: str, port: str = "0") -> None:
    Front.engine = chdb.connect(str(Path(directory) / "data"))
    Front.engine.query("SET max_threads = 1")
    Front.engine.query("SET input_format_parallel_parsing = 0")
    Front.scratch = directory
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Front)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    if os.getppid() == 1:
        sys.exit("started by nobody")
    main(*sys.argv[1:])
