"""A wire to a PostgreSQL server that can be cut: at a chosen message, for a while, with or without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from database_places import Server

# What a client sends before TLS: 8 bytes, the request's number (PostgreSQL's protocol, "SSLRequest").
_SSL_REQUEST = bytes((0, 0, 0, 8, 4, 210, 22, 47))


class Wire:
    """Forwards connections to a server's socket. Of the messages in `cut_at` the next that passes takes its connection
    along: before it reaches the server, or with `after` once the server has done it and before the client hears so."""

    def __init__(self, server: Server, *, tls: ssl.SSLContext | None = None, port: bool = False) -> None:
        self._target = str(server.folder / ".s.PGSQL.5432")
        self._tls = tls
        self._folder = tempfile.TemporaryDirectory(prefix="pagegen-wire-")  # a socket's path has 107 characters at most
        self._address = ("127.0.0.1", 0) if port else f"{self._folder.name}/.s.PGSQL.5432"
        self.accepted = 0
        self.cut_at: bytes | None = None
        self.after = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.up()

    def up(self) -> None:
        """Listens, from now on."""
        self._listener = socket.create_server(self._address) if isinstance(self._address, tuple) else self._unix()
        self._address = self._listener.getsockname() or self._address
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _unix(self) -> socket.socket:
        Path(str(self._address)).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(64)
        return listener

    def down(self) -> None:
        """Cuts every connection, and refuses new ones until `up`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if isinstance(self._address, str):
            Path(self._address).unlink(missing_ok=True)
        for end in list(self._open):
            self._close(end)

    def url(self, url: str, user: str = "pagegen", **query: str) -> str:
        """The URL of a database of the server, over this wire."""
        database = url.split("@/")[1].split("?")[0]
        if isinstance(self._address, tuple):
            base = f"postgresql://{user}@localhost:{self._address[1]}/{database}"
        else:
            base, query = f"postgresql://{user}@/{database}", {"host": self._folder.name, **query}
        return base + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else "")

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.accepted += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            if self._tls is not None:
                assert client.recv(8, socket.MSG_WAITALL) == _SSL_REQUEST
                client.sendall(b"S")
                client = self._tls.wrap_socket(client, server_side=True)
            server.connect(self._target)
            self._open |= {client, server}
            threading.Thread(target=self._forward, args=(server, client), daemon=True).start()
            self._forward(client, server, watched=True)
        for end in (client, server):
            self._close(end)

    def _forward(self, source: socket.socket, sink: socket.socket, *, watched: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    cut = watched and self.cut_at is not None and self.cut_at in data
                    if cut:
                        self.cut_at = None
                if cut and self.after:
                    with contextlib.suppress(OSError):
                        source.shutdown(socket.SHUT_WR) if self._tls is None else None  # the client hears nothing more
                    sink.sendall(data)
                    # the server has done what it was told once it closes on the end of the stream
                    sink.shutdown(socket.SHUT_WR)
                    threading.Event().wait(0.2)
                if cut:
                    break
                sink.sendall(data)
        for end in (source, sink):
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        self._open.discard(end)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextlib.contextmanager
def wire(server: Server, **how) -> Iterator[Wire]:
    """A wire that is cut at the end."""
    made = Wire(server, **how)
    try:
        yield made
    finally:
        made.down()


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A certificate for localhost that signs itself: the server's side, and the file that a client trusts."""
    key, signed = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", signed, *subject]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed, key)
    return context, signed
