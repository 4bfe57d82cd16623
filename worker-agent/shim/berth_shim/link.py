"""Connects the shim to the agent's unix socket, sends frames to it, and reads its commands.

A thread of the link connects, sends the hello (the first frame) and reads commands. The engine's
own thread sends all other frames, takes the commands, and never waits for the socket. If the socket
takes only part of a frame, the link keeps the rest: until that is sent, `flush` returns false, and
the engine's thread must not send another frame.
"""

import os
import socket
import struct
import threading
import time

from . import wire

# The pause doubles with each failure. The maximum bounds how late the link finds an agent that has
# started again. A failed attempt costs only microseconds.
RECONNECT_SECONDS_MIN, RECONNECT_SECONDS_MAX = 0.1, 1.0
# The hello's few hundred bytes go into an empty buffer: only a stuck agent can cause a wait.
HELLO_SECONDS_MAX = 5.0
# The agent lets 256 requests about sessions wait for an answer at once, and answers one question of
# each turn that waits for the trimmer.
COMMANDS_MAX = 8192
# Root, or a service manager, makes it for the agent's user. Only root can make it.
SYSTEM_FOLDER = "/run/berth"


class Link:
    """The shim's end of the connection. The agent's socket may be at each of `paths`."""

    def __init__(self, paths: list[str], is_path_configured: bool, hello: bytes):
        self._paths = paths
        self._is_path_configured = is_path_configured
        self._hello = hello
        self._socket: socket.socket | None = None
        # Guards the commands, and keeps the socket open during a send. Its holder never waits.
        self._lock = threading.Lock()
        self._unsent = b""
        self.connection_number = 0
        self._queued_commands: list[wire.Command] = []
        # A byte in it wakes an idle scheduler, which polls `wake_receiver`.
        self.wake_receiver, self._wake_sender = socket.socketpair()
        self.wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)

    def start(self) -> None:
        """Starts the thread that connects and reads commands."""
        threading.Thread(target=self._keep_connected, name="berth-shim", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def has_commands(self) -> bool:
        """Whether commands are waiting."""
        return bool(self._queued_commands)

    def flush(self) -> bool:
        """Tries to send the rest of the latest frame. Returns whether an agent is connected and
        nothing is left to send."""
        if self._unsent:
            self._send()
        return self._socket is not None and not self._unsent

    def send(self, frame: bytes, connection_number: int) -> None:
        """Sends a frame, unless another connection replaced this one. Only after a true `flush`."""
        with self._lock:
            if connection_number != self.connection_number:
                return
            self._unsent = frame
        self._send()

    def _send(self) -> None:
        """Sends as much of the unsent bytes as the socket takes. Drops them without a socket."""
        with self._lock:
            if self._socket is None:
                self._unsent = b""
                return
            try:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                sent_bytes = self._socket.send(self._unsent, flags)
                self._unsent = self._unsent[sent_bytes:]
            except BlockingIOError:
                pass
            except OSError:
                # The link's thread then sees the end of the connection, and connects again.
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
            # The buffer is full of wake-up bytes, so the scheduler wakes up anyway.
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

    def take_commands(self) -> list[wire.Command]:
        """Takes the waiting commands, and removes the wake-up bytes."""
        with self._lock:
            self._drain_wake_bytes()
            commands = list(self._queued_commands)
            self._queued_commands.clear()
        return commands

    def _shut_down(self) -> None:
        """Ends the connection, if there is one. Must be called with the lock held."""
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _keep_connected(self) -> None:
        """Connects, reads commands until the connection ends, and starts over. Never returns."""
        pause_seconds = RECONNECT_SECONDS_MIN
        while True:
            for path in self._paths:
                try:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                        hello = self._connect(connection, path)
                        pause_seconds = RECONNECT_SECONDS_MIN
                        self._read_commands(connection, hello)
                except (OSError, wire.ProtocolError):
                    # There is no agent, it has disconnected, or it uses another protocol.
                    pass
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, RECONNECT_SECONDS_MAX)

    def _connect(self, connection: socket.socket, path: str) -> bytes:
        """Connects the socket to the agent at `path` and sends the hello. Returns what was sent."""
        connection.settimeout(HELLO_SECONDS_MAX)
        connection.connect(path)
        if not self._is_trusted(connection, path):
            raise PermissionError(f"{path} belongs to another user")
        hello = self._hello
        connection.sendall(hello)
        connection.settimeout(None)
        return hello

    def _is_trusted(self, connection: socket.socket, path: str) -> bool:
        """Whether the agent runs as the engine's own user or as root. An engine that runs as root
        also trusts any user at the path that the operator set, and the user to whom root gave
        SYSTEM_FOLDER."""
        credentials_bytes = struct.calcsize("iii")
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, credentials_bytes
        )
        _pid, uid, _gid = struct.unpack("iii", credentials)
        if uid in (0, os.getuid()):
            return True
        if os.getuid() != 0:
            return False
        folder = os.path.dirname(path)
        return self._is_path_configured or (
            folder == SYSTEM_FOLDER and os.lstat(folder).st_uid == uid
        )

    def _read_commands(self, connection: socket.socket, sent_hello: bytes) -> None:
        """Lets the engine's thread send, and reads commands until the agent disconnects."""
        with self._lock:
            if sent_hello is not self._hello:
                # `reconnect` came too early to end this connection.
                return
            self._unsent = b""
            self._socket = connection
            self.connection_number += 1
            # Commands of an earlier connection need no answers any more.
            self._queued_commands.clear()
        try:
            # A new agent needs a full table of the sessions.
            self._queue_command(wire.SampleNow())
            buffer = bytearray()
            while received := connection.recv(65536):
                buffer += received
                for command in wire.take_commands(buffer):
                    self._queue_command(command)
        finally:
            with self._lock:
                self._socket = None

    def _queue_command(self, command: wire.Command) -> None:
        """Queues a command for the engine's thread, and wakes an idle scheduler."""
        if len(self._queued_commands) >= COMMANDS_MAX:
            raise wire.ProtocolError("too many commands are waiting")
        # Without the lock over both lines, `take_commands` could take the command before its
        # wake-up byte is sent, and this byte would remain.
        with self._lock:
            self._queued_commands.append(command)
            self.wake()


def socket_paths(port: int) -> tuple[list[str], bool]:
    """Returns where the agent's socket for the engine at this HTTP port may be, and whether the
    operator set that. The agent takes the first that it can use: `config/state_folder.rs`. Its
    environment may differ from the engine's, so the shim tries each.
    """
    if configured_path := os.environ.get("BERTH_SHIM_SOCKET"):
        return [configured_path], True
    state_home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state_home):
        state_home = os.path.expanduser("~/.local/state")
    runtimes = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"]
    folders = [os.path.join(path, "berth") for path in runtimes if os.path.isabs(path)]
    folders += [SYSTEM_FOLDER, os.path.join(state_home, "berth")]
    return [f"{folder}/engine-{port}.sock" for folder in dict.fromkeys(folders)], False
