"""Tests the shim's connection to its agent."""

import socket
import tempfile
from contextlib import ExitStack

from berth_shim.link import Link

PATIENCE_SECONDS = 20


class Interrupted(Link):
    """The engine's thread changes the hello just after the first one was sent."""

    def _read_commands(self, connection: socket.socket, sent_hello: bytes) -> None:
        if sent_hello == b"old":
            self.reconnect(b"new")
        super()._read_commands(connection, sent_hello)


def test_a_hello_that_changes_while_it_is_sent_is_sent_again() -> None:
    with ExitStack() as stack:
        path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/agent.sock"
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen()
        listening.settimeout(PATIENCE_SECONDS)
        Interrupted([path], True, b"old").start()
        for hello in (b"old", b"new"):
            # The first one stays open: its end would make the shim connect again.
            connection = stack.enter_context(listening.accept()[0])
            connection.settimeout(PATIENCE_SECONDS)
            assert connection.recv(100) == hello
