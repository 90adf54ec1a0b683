"""A real S3 server over HTTP for tests, with a line to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pyarrow.fs as pafs

BUCKET = "recordings"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """Moto's server in a process of its own. `denying`: it knows nobody's key."""

    def __init__(self, *, denying: bool = False) -> None:
        self.port = free_port()
        command = [
            sys.executable,
            "-c",
            "from moto.server import main; main()",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        env = {**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if denying else {})}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.05)
        self.fs = pafs.S3FileSystem(
            access_key="testing",
            secret_key="testing",
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}",
            allow_bucket_creation=True,
        )

    def url(self, prefix: str, port: int | None = None) -> str:
        return f"s3://{BUCKET}/{prefix}?scheme=http&endpoint_override=127.0.0.1:{port or self.port}"

    def keys(self, prefix: str) -> list[str]:
        """Objects below a prefix, relative to it."""
        selector = pafs.FileSelector(f"{BUCKET}/{prefix}", recursive=True, allow_not_found=True)
        found = [info.path for info in self.fs.get_file_info(selector) if info.is_file]
        return sorted(path.removeprefix(f"{BUCKET}/{prefix}/") for path in found)

    def put(self, key: str, data: bytes) -> None:
        with self.fs.open_output_stream(f"{BUCKET}/{key}") as stream:
            stream.write(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


class Line:
    """A TCP line to a server: up, or down, as if nobody listened."""

    def __init__(self, server_port: int, *, up: bool = True) -> None:
        self.port = free_port()
        self._to = server_port
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []
        if up:
            self.up()

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        if self._listener is not None:
            # Closing alone doesn't wake a thread that accepts.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
