"""Tests the shim's end of the protocol: the example frames of both ends, its bounds, bad frames."""

import struct
import unittest
from pathlib import Path

import msgspec
from berth_shim import wire

SHIM_DIR = Path(__file__).parents[3] / "worker-agent/src/shim"
FRAMES = dict(line.split() for line in (SHIM_DIR / "codec/frames.txt").read_text().splitlines())
INSTANCE = bytes(range(16))
U32_MAX, U64_MAX = (1 << 32) - 1, (1 << 64) - 1


def _planned(plan: str, question: int | None) -> wire.Planned:
    return wire.Planned(question, plan, 1, 2, 3, 4, "s-é", "rid-1", "why")


MESSAGES = {
    "hello": wire.Hello(
        7, 3, 16, 1 << 40, 4096, INSTANCE, "0.5.23", "0.1.0", undemotable_reason="no",
        device="cpu", page_bytes=1 << 33,
        pin_safety=wire.PinSafety("why", "more"),
    ),
    "update": wire.Update(
        seq=1,
        facts=wire.RankFacts(*range(2, 17), True, wire.HostFacts(*range(17, 24))),
        begins_table=True,
        ends_table=False,
        events=[
            wire.Opened("a", False), wire.Closed("b"), wire.Committed("c", "rid-1", 60, True),
            wire.Aborted("d", True), wire.Demoted(1 << 40, "e", "busy"),
            wire.Demoted(8, "f", None), wire.Prefetched(1 << 40, "h", 1 << 33, None),
            wire.Prefetched(8, "i", 0, "busy"), wire.Inspected(9, None),
            wire.Inspected(1 << 40, wire.SessionFacts("g", True, True, False, 3, 2, 1, 4)),
        ],
        gone_ids=["gone-é"],
        sessions=[wire.SessionFacts("s", True, False, True, 59, 58, 32, 60)],
    ),
    "update-without-facts": wire.Update(2, None, False, True, [], [], []),
    "audited": wire.Audited(1 << 40, (1, 1000), None, ["a", "é"], bytes(range(5))),
    "refused": wire.Audited(2, (0, 0), "no", [], b""),
    "trimmer": wire.Trimmer(7, INSTANCE, "0.5.23", "0.1.0", None),
    "inert": wire.Trimmer(7, bytes(16), "0.6.0", "0.1.0", "it is not known"),
    "trimmed": _planned("trimmed", None),
    "retokenized": _planned("retokenized", None),
    "diverged": _planned("diverged", 1 << 40),
    "planned-refused": _planned("refused", 1 << 40),
}
COMMANDS = {
    "demote": wire.Demote(1 << 40, "sé-1"),
    "prefetch": wire.Prefetch(7, "sé-1", 1 << 33),
    "inspect": wire.Inspect(7, "sé-1"),
    "sample-now": wire.SampleNow(),
    "audit": wire.Audit(1 << 40),
    "republish": wire.Republish(),
    "run": wire.Run(7, 51_200, "s-2"),
    "run-unchanged": wire.Run(8, 0, None),
}


def _framed(version: int, message: object) -> bytearray:
    body = msgspec.msgpack.encode(message)
    return bytearray(struct.pack("<IB", 1 + len(body), version) + body)


class TestFrames(unittest.TestCase):
    def test_messages_are_encoded_as_the_agent_expects(self) -> None:
        for name, message in MESSAGES.items():
            self.assertEqual(wire.encode(message).hex(), FRAMES[name], name)

    def test_commands_are_what_the_agent_encodes(self) -> None:
        frames = bytearray.fromhex("".join(FRAMES[name] for name in COMMANDS))
        cut = frames[-5:]
        del frames[-5:]
        commands = list(wire.take_commands(frames))
        frames += cut
        self.assertEqual([*commands, *wire.take_commands(frames)], list(COMMANDS.values()))
        self.assertEqual(frames, b"")

    def test_every_example_is_used(self) -> None:
        self.assertEqual(set(FRAMES), {*MESSAGES, *COMMANDS})

    def test_texts_are_cut_between_characters_and_made_valid(self) -> None:
        cut = wire.Committed("é" * 300, "x" + "é" * 300, 1, False)
        self.assertEqual((cut.id, cut.rid), ("é" * 256, "x" + "é" * 255))
        self.assertEqual(wire.Demoted(1, "a\ud800", None).id, "a?")
        hello = msgspec.structs.replace(MESSAGES["hello"], inert_reason="n" * 600)
        self.assertEqual(len(hello.inert_reason), wire.NAME_BYTES_MAX)

    def test_an_integer_of_another_type_is_a_number(self) -> None:
        class Count:
            def __index__(self) -> int:
                return 15

        update = MESSAGES["update"]
        facts = msgspec.structs.replace(update.facts, samples_ns=Count())
        counted = msgspec.structs.replace(update, facts=facts)
        self.assertEqual(wire.encode(counted).hex(), FRAMES["update"])

    def test_the_largest_messages_fit(self) -> None:
        names = [f"{number:0{wire.NAME_BYTES_MAX}}" for number in range(wire.AUDIT_NAMES_MAX)]
        ids = names[: wire.SESSIONS_MAX]
        count = (U32_MAX,) * 4
        update = wire.Update(
            U64_MAX, wire.RankFacts(*(U64_MAX,) * 15, True, wire.HostFacts(*(U64_MAX,) * 7)), True, True,
            [wire.Committed(name, name, U32_MAX, True) for name in names[: wire.EVENTS_MAX]], ids,
            [wire.SessionFacts(id, True, True, True, *count) for id in ids],
        )
        report = bytes(wire.AUDIT_BYTES_MAX)
        audited = wire.Audited(U64_MAX, (U64_MAX, 10**9 - 1), None, names, report)
        for message in (update, audited):
            length = len(wire.encode(message)) - 4
            self.assertLessEqual(length, wire.FRAME_BYTES_MAX, type(message).__name__)
            self.assertGreater(length, wire.FRAME_BYTES_MAX * 3 // 4, type(message).__name__)


class TestBadFrames(unittest.TestCase):
    def test_another_version_is_named(self) -> None:
        # A command of protocol 4, which asked for a sample.
        frames = bytearray(struct.pack("<IBB", 2, 4, 17))
        with self.assertRaisesRegex(wire.ProtocolError, "protocol version 4"):
            list(wire.take_commands(frames))

    def test_a_length_out_of_bounds_is_refused_before_the_frame_is_there(self) -> None:
        for length in (0, 1, 1 + wire.FRAME_BYTES_MAX, U32_MAX):
            with self.assertRaisesRegex(wire.ProtocolError, f"a frame of {length} bytes"):
                list(wire.take_commands(bytearray(struct.pack("<I", length))))

    def test_what_is_no_command_is_refused(self) -> None:
        for message in (
            ["Hello"], ["Demote"], ["Demote", 1], ["Demote", "s"], ["Demote", "s", 1],
            ["Demote", -1, "s"], ["Inspect", "s"], ["SampleNow", 1],
            ["Audit", -1], ["Audit", True], ["Run", 1, -1, "s"], ["Run", 1, 2, 3], [], {}, 16, None,
        ):
            with self.assertRaises(wire.ProtocolError, msg=message):
                list(wire.take_commands(_framed(wire.VERSION, message)))
        valid = _framed(wire.VERSION, ["SampleNow"])
        longer = struct.pack("<I", len(valid) - 3) + valid[4:] + b"\0"
        with self.assertRaises(wire.ProtocolError):
            list(wire.take_commands(bytearray(longer)))
