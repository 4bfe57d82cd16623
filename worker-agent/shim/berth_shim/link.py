"""The connection to the agent.

A thread connects, says hello and reads commands. The scheduler's thread sends, and never waits. If
the socket takes only part of a frame, the rest is kept and sent later. Until then `flush` returns
false, and the sender must keep its data back.
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

    def __init__(self, path: str, path_is_set: bool, hello: bytes):
        self._path = path
        # Whether the operator set the path.
        self._path_is_set = path_is_set
        self._hello = hello
        self._socket: socket.socket | None = None
        # Guards the commands, and the socket against being closed during a send. No holder blocks.
        self._lock = threading.Lock()
        self._unsent = b""
        # Counts the connections. Frames for an older connection are dropped.
        self.connection_number = 0
        self._queued_commands: list[tuple[int, Any]] = []
        # A byte in this pair wakes an idle scheduler.
        self.wake_receiver, self._wake_sender = socket.socketpair()
        self.wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def start(self) -> None:
        threading.Thread(target=self._keep_connected, name="berth-shim", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def has_commands(self) -> bool:
        """Whether commands are waiting."""
        return bool(self._queued_commands)

    def flush(self) -> bool:
        """Tries to send the rest of the last frame. Returns whether an agent is connected and
        everything was sent."""
        if self._unsent:
            self._send()
        return self._socket is not None and not self._unsent

    def send(self, frame: bytes, connection: int) -> None:
        """Sends a frame. Call only after `flush` has returned true. Frames for an older connection
        are dropped."""
        with self._lock:
            if connection != self.connection_number:
                return
            self._unsent = frame
        self._send()

    def _send(self) -> None:
        with self._lock:
            if self._socket is None:
                self._unsent = b""
                return
            try:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
            except BlockingIOError:
                pass
            except OSError:
                # The thread notices the end when it reads, and connects again.
                self._shut_down()

    def set_hello(self, hello: bytes) -> None:
        """Sets the hello for later connections."""
        self._hello = hello

    def reconnect(self, hello: bytes) -> None:
        """Changes the hello and reconnects, so that the agent receives it."""
        self.set_hello(hello)
        with self._lock:
            self._shut_down()

    def wake(self) -> None:
        """Wakes an idle scheduler. Any thread may call this."""
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            # The buffer is full of wake-up bytes already.
            pass

    def clear_wake(self) -> None:
        """Removes the wake-up bytes, unless commands are waiting."""
        with self._lock:
            if not self._queued_commands:
                self._drain_wake_bytes()

    def _drain_wake_bytes(self) -> None:
        try:
            self.wake_receiver.recv(4096)
        except BlockingIOError:
            pass

    def take_commands(self) -> list[tuple[int, Any]]:
        """Takes the waiting commands, and removes the wake-up bytes."""
        with self._lock:
            self._drain_wake_bytes()
            taken = list(self._queued_commands)
            self._queued_commands.clear()
        return taken

    def _shut_down(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _keep_connected(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    self._connect(connection)
                    pause = PAUSE_SECONDS_MIN
                    self._read_commands(connection)
            except (OSError, wire.ProtocolError):
                # There is no agent, it has disconnected, or it uses another protocol.
                pass
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _connect(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_SECONDS_MAX)
        connection.connect(self._path)
        if not self._is_trusted(connection):
            raise PermissionError(f"{self._path} belongs to another user")
        connection.sendall(self._hello)
        connection.settimeout(None)

    def _is_trusted(self, connection: socket.socket) -> bool:
        """Whether the agent runs as the engine's own user or as root. If the engine runs as root
        and the operator set the path, any user is trusted."""
        size = struct.calcsize("iii")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _pid, uid, _gid = struct.unpack("iii", raw)
        return uid in (0, os.getuid()) or (self._path_is_set and os.getuid() == 0)

    def _read_commands(self, connection: socket.socket) -> None:
        """Lets the scheduler's thread send, and reads commands until the agent disconnects."""
        with self._lock:
            self._unsent = b""
            self._socket = connection
            self.connection_number += 1
            # Commands of the previous connection have no receiver for their answers.
            self._queued_commands.clear()
        try:
            self._queue_command((wire.SAMPLE_NOW, ""))
            buffer = bytearray()
            while received := connection.recv(65536):
                buffer += received
                for command in wire.take_commands(buffer):
                    self._queue_command(command)
        finally:
            with self._lock:
                self._socket = None

    def _queue_command(self, command: tuple[int, Any]) -> None:
        if len(self._queued_commands) >= COMMANDS_MAX:
            raise wire.ProtocolError("too many commands are waiting")
        # Both under the lock: if a command were taken in between, its wake-up byte would remain.
        with self._lock:
            self._queued_commands.append(command)
            self.wake()


def socket_path(port: int) -> tuple[str, bool]:
    """Returns the socket path of the agent for the engine at this HTTP port, and whether the
    operator set it."""
    if named := os.environ.get("BERTH_SHIM_SOCKET"):
        return named, True
    return f"/tmp/berth-{os.getuid()}/engine-{port}.sock", False
