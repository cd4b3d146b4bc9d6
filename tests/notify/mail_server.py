"""A mail server on this machine that answers as a script says."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Mailbox:
    """``answers``: verb -> what to say instead of yes; ``None`` hangs up, ``""`` says nothing at all."""

    answers: Mapping[str, str | None] = field(default_factory=dict)
    mails: list[str] = field(default_factory=list)
    port: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def url(self, user: str = "", to: str = "you@example.com") -> str:
        return f"mailto://{user}127.0.0.1:{self.port}?smtp=127.0.0.1&from=me@example.com&to={to}&mode=insecure"


class _Talk(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.say("CONNECT", "220 here")
        while line := self.rfile.readline():
            verb = line.split()[0].upper().decode() if line.split() else ""
            if verb == "EHLO":
                self.say(verb, "250-here\r\n250 AUTH PLAIN")
            elif verb == "DATA" and self.say(verb, "354 go on"):
                self.take()
            elif verb == "QUIT":
                return self.say(verb, "221 bye")
            elif verb != "DATA":
                self.say(verb, "235 in" if verb == "AUTH" else "250 yes")
        return None

    def take(self) -> None:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line)
        self.server.box.mails.append(b"".join(lines).decode())
        self.say("END", "250 taken")

    def say(self, verb: str, usual: str) -> bool:
        answer = self.server.box.answers.get(verb, usual)
        if answer == "":
            self.server.box.closing.wait()
        if not answer:
            raise ConnectionError
        self.wfile.write(answer.encode() + b"\r\n")
        return answer == usual


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address, block_on_close = True, True, False

    def handle_error(self, request: object, client_address: object) -> None:
        """Hanging up is in the script."""


@contextmanager
def mail_server(**answers: str | None) -> Iterator[Mailbox]:
    """Serves while the block runs."""
    box = Mailbox(answers)
    server = _Server(("127.0.0.1", 0), _Talk)
    server.box, box.port = box, server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield box
    finally:
        box.closing.set()
        server.shutdown()
        server.server_close()
