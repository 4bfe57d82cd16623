"""Models for the trimming tests: a toy tokenizer that drifts, and the engine's sessions.

The engine's model follows SGLang's code (`Session`, `StreamingSession`), not the shim's.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

BEGIN, TURN_BEGIN, TURN_END, CALL = SPECIALS = ("<b>", "<s>", "<e>", "<c>")
# Pieces of two and three bytes cause drift: an answer may spell its text in other tokens than the
# tokenizer does. A half of `é` is no text by itself; a client sees `\ufffd` in its place.
PIECES = [
    *(bytes([byte]) for byte in sorted({*b"ab \n", *"é\ufffd".encode()})),
    b"ab", b"ba", b"aab", b" a", b" b", b"\n\n", "é".encode(), "\ufffd".encode(),
    # Some tokenizers have a separate id for the first word of a text. So text after a cut may get
    # other ids when it is tokenized alone.
    b"b", b"ba",
]
FIRST_PIECE = len(SPECIALS)
BOS = 0
TURN_END_ID = SPECIALS.index(TURN_END)
ID_COUNT = FIRST_PIECE + len(PIECES)
FIRST_WORDS = {PIECES[-2]: ID_COUNT - 2, PIECES[-1]: ID_COUNT - 1}


class ToyTokenizer:
    """Encodes the longest piece first, between special tokens, so an id depends on the text around
    it."""

    split_ids = frozenset(range(FIRST_PIECE))

    def decode(self, ids: Sequence[int]) -> str:
        return raw(ids).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        pieces = [special.encode() for special in SPECIALS] + PIECES
        ids: list[int] = []
        rest = text.encode()
        while rest:
            fitting = [id for id, piece in enumerate(pieces) if rest.startswith(piece)]
            id = max(fitting, key=lambda id: (len(pieces[id]), -id))
            first = not ids or ids[-1] in self.split_ids
            ids.append(FIRST_WORDS.get(pieces[id], id) if first else id)
            rest = rest[len(pieces[id]) :]
        return ids

    def pieces(self, ids: Sequence[int]) -> str:
        return raw(ids).decode("latin-1")


def raw(ids: Sequence[int]) -> bytes:
    """Returns the exact bytes of the ids' text, by which two texts are compared."""
    texts = [special.encode() for special in SPECIALS] + PIECES
    return b"".join(texts[id] for id in ids)


@dataclass
class EngineSession:
    """A streaming session: the context before the next turn, and the turn that runs."""

    context: list[int] = field(default_factory=list)
    prompt: list[int] | None = None
    answer: list[int] = field(default_factory=list)
    retracted: bool = False
    # The adapter with which the KV was computed.
    adapter: str | None = None

    def accept(self, ids: Sequence[int], adapter: str | None) -> list[int]:
        """Begins a turn that brings these ids. Returns the turn's whole prompt."""
        assert self.prompt is None, "an overlapping turn reached the engine"
        ids = list(ids)
        if self.context and ids and ids[0] == BOS:
            ids = ids[1:]
        self.prompt = self.context + ids
        assert self.prompt, "an empty prompt reached the engine"
        assert not self.context or adapter == self.adapter, "KV of another adapter"
        self.adapter = adapter
        self.answer, self.retracted = [], False
        return self.prompt

    def generate(self, ids: Sequence[int]) -> None:
        self.answer += ids

    def retract(self) -> None:
        self.retracted = True

    def finish(self, stop: int) -> list[int]:
        """Ends the turn successfully after `stop` ids of its answer. Returns the ids that are sent
        out."""
        sent = self.answer[:stop]
        self.context = self.prompt + sent
        self.prompt = None
        return sent

    def abort(self) -> None:
        if self.retracted:
            self.context = self.prompt + self.answer
        self.prompt = None


def ids_of(text: str) -> array:
    return array("q", ToyTokenizer().encode(text))
