"""The connection to the agent: a thread connects, says hello and reads commands; the scheduler's
thread sends, and never waits.

A frame that the socket takes only in part is kept and finished later; until then `ready` is false
and the sender holds back. What is held back is the sender's business.
"""

import os
import socket
import struct
import threading
import time
from typing import Any

from . import wire

# An agent that comes back is found within this; a failed connect costs some microseconds.
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 1.0
# Hello is a few hundred bytes into an empty buffer; the agent that can't take it isn't well.
HELLO_SECONDS_MAX = 5.0
# Commands that wait for a scheduler step. The agent sends one per session it wants demoted.
COMMANDS_MAX = 1024


class Link:
    """One end of the socket. `path` is where the agent listens, `hello` the frame it is told
    first."""

    def __init__(self, path: str, named: bool, hello: bytes):
        self._path = path
        # Whether the operator named the path.
        self._named = named
        self._hello = hello
        self._socket: socket.socket | None = None
        # Guards the commands, and the socket against being closed under a send. Nobody waits while
        # holding it.
        self._lock = threading.Lock()
        self._rest = b""
        # Grows with each connection; what was known to be sent was sent on an older one.
        self.connections = 0
        self._commands: list[tuple[int, Any]] = []
        # A byte in it ends the sleep of an idle scheduler.
        self.wake_read, self._wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="berth-shim", daemon=True).start()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def asked(self) -> bool:
        """Are there commands?"""
        return bool(self._commands)

    def ready(self) -> bool:
        """Is somebody there, and has he taken all so far? Tries to hand over what is left."""
        if self._rest:
            self._send()
        return self._socket is not None and not self._rest

    def send(self, frame: bytes, connection: int) -> None:
        """Only when ready. A frame made for an older connection means nothing to a newer one."""
        with self._lock:
            if connection != self.connections:
                return
            self._rest = frame
        self._send()

    def _send(self) -> None:
        with self._lock:
            if self._socket is None:
                self._rest = b""
                return
            try:
                sent = self._socket.send(self._rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._rest = self._rest[sent:]
            except BlockingIOError:
                pass
            except OSError:
                # The thread reads its end, and connects anew.
                self._shut()

    def greet(self, hello: bytes) -> None:
        """Says this from now on, to who comes."""
        self._hello = hello

    def say(self, hello: bytes) -> None:
        """Says something else from now on, by a new connection."""
        self.greet(hello)
        with self._lock:
            self._shut()

    def wake(self) -> None:
        """Ends the sleep of an idle scheduler. Any thread may."""
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            # Enough alarms ring.
            pass

    def hush(self) -> None:
        """Clears the alarm, unless it rings for commands."""
        with self._lock:
            if not self._commands:
                self._clear_alarm()

    def _clear_alarm(self) -> None:
        try:
            self.wake_read.recv(4096)
        except BlockingIOError:
            pass

    def take_commands(self) -> list[tuple[int, Any]]:
        """What the agent has asked for since; clears the alarm."""
        with self._lock:
            self._clear_alarm()
            taken = list(self._commands)
            self._commands.clear()
        return taken

    def _shut(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _run(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    self._connect(connection)
                    pause = PAUSE_SECONDS_MIN
                    self._read(connection)
            except (OSError, wire.Malformed):
                # No agent, one that has gone, or one that speaks something else.
                pass
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _connect(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_SECONDS_MAX)
        connection.connect(self._path)
        if not self._trusted(connection):
            raise PermissionError(f"{self._path} is somebody else's")
        connection.sendall(self._hello)
        connection.settimeout(None)

    def _trusted(self, connection: socket.socket) -> bool:
        """The engine's own user, or root; anyone whom the operator named to an engine of root's."""
        size = struct.calcsize("iii")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _pid, uid, _gid = struct.unpack("iii", raw)
        return uid in (0, os.getuid()) or (self._named and os.getuid() == 0)

    def _read(self, connection: socket.socket) -> None:
        """Opens the socket to the scheduler's thread, and reads until the agent has gone."""
        with self._lock:
            self._rest = b""
            self._socket = connection
            self.connections += 1
            # Who asked for these has gone.
            self._commands.clear()
        try:
            self._command((wire.SAMPLE_NOW, ""))
            buffer = bytearray()
            while received := connection.recv(65536):
                buffer += received
                for command in wire.commands(buffer):
                    self._command(command)
        finally:
            with self._lock:
                self._socket = None

    def _command(self, command: tuple[int, Any]) -> None:
        if len(self._commands) >= COMMANDS_MAX:
            raise wire.Malformed("more commands than the scheduler takes")
        # Both or none, or a command taken in between would leave the alarm ringing.
        with self._lock:
            self._commands.append(command)
            self.wake()


def socket_path(port: int) -> tuple[str, bool]:
    """Where the agent of the engine at this HTTP port listens, and whether the operator said so."""
    if named := os.environ.get("BERTH_SHIM_SOCKET"):
        return named, True
    return f"/tmp/berth-{os.getuid()}/engine-{port}.sock", False
