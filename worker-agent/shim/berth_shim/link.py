"""The connection to the agent.

A thread connects, says hello and reads commands. The scheduler's thread sends, and never waits. If
the socket takes only part of a frame, the rest is kept and sent later. Until then `ready` is false,
and the sender must keep its data back.
"""

import os
import socket
import struct
import threading
import time
from typing import Any

from . import wire

# The pause before connecting again, which bounds how late a returning agent is found. A failed
# connect costs some microseconds.
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 1.0
# The time limit for sending hello: a few hundred bytes into an empty buffer take this long only if
# the agent is stuck.
HELLO_SECONDS_MAX = 5.0
# The maximum number of commands that wait for a scheduler step. The agent sends one per session to
# demote.
COMMANDS_MAX = 1024


class Link:
    """One end of the socket. `path` is where the agent listens; `hello` is the first frame."""

    def __init__(self, path: str, named: bool, hello: bytes):
        self._path = path
        # Whether the operator set the path.
        self._named = named
        self._hello = hello
        self._socket: socket.socket | None = None
        # Guards the commands, and the socket against being closed during a send. No holder blocks.
        self._lock = threading.Lock()
        self._rest = b""
        # Counts the connections. Frames for an older connection are dropped.
        self.connections = 0
        self._commands: list[tuple[int, Any]] = []
        # A byte in this pair wakes an idle scheduler.
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
        """Whether commands are waiting."""
        return bool(self._commands)

    def ready(self) -> bool:
        """Whether an agent is connected and everything was sent. Tries to send the rest first."""
        if self._rest:
            self._send()
        return self._socket is not None and not self._rest

    def send(self, frame: bytes, connection: int) -> None:
        """Sends a frame. Call only when `ready`. Frames for an older connection are dropped."""
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
                # The thread notices the end when it reads, and connects again.
                self._shut()

    def greet(self, hello: bytes) -> None:
        """Sets the hello for later connections."""
        self._hello = hello

    def say(self, hello: bytes) -> None:
        """Changes the hello and reconnects, so that the agent receives it."""
        self.greet(hello)
        with self._lock:
            self._shut()

    def wake(self) -> None:
        """Wakes an idle scheduler. Any thread may call this."""
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            # The buffer is full of wake-up bytes already.
            pass

    def hush(self) -> None:
        """Removes the wake-up bytes, unless commands are waiting."""
        with self._lock:
            if not self._commands:
                self._clear_alarm()

    def _clear_alarm(self) -> None:
        try:
            self.wake_read.recv(4096)
        except BlockingIOError:
            pass

    def take_commands(self) -> list[tuple[int, Any]]:
        """Takes the waiting commands, and removes the wake-up bytes."""
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
                # There is no agent, it has disconnected, or it uses another protocol.
                pass
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _connect(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_SECONDS_MAX)
        connection.connect(self._path)
        if not self._trusted(connection):
            raise PermissionError(f"{self._path} belongs to another user")
        connection.sendall(self._hello)
        connection.settimeout(None)

    def _trusted(self, connection: socket.socket) -> bool:
        """Whether the agent runs as the engine's own user or as root. If the engine runs as root
        and the operator set the path, any user is trusted."""
        size = struct.calcsize("iii")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _pid, uid, _gid = struct.unpack("iii", raw)
        return uid in (0, os.getuid()) or (self._named and os.getuid() == 0)

    def _read(self, connection: socket.socket) -> None:
        """Lets the scheduler's thread send, and reads commands until the agent disconnects."""
        with self._lock:
            self._rest = b""
            self._socket = connection
            self.connections += 1
            # Commands of the previous connection have no receiver for their answers.
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
            raise wire.Malformed("too many commands are waiting")
        # Both under the lock: if a command were taken in between, its wake-up byte would remain.
        with self._lock:
            self._commands.append(command)
            self.wake()


def socket_path(port: int) -> tuple[str, bool]:
    """Returns the socket path of the agent for the engine at this HTTP port, and whether the
    operator set it."""
    if named := os.environ.get("BERTH_SHIM_SOCKET"):
        return named, True
    return f"/tmp/berth-{os.getuid()}/engine-{port}.sock", False
