"""The soak's prompts: token ids, and the text that the model's tokenizer turns into these ids.

A byte is a token, so what a client sends and receives are lists of ids of known length.
"""

import random

VOCABULARY = 320
FOREIGN_IDS = (320, 5000, 2**31)
_SPECIAL = range(256, 260)  # They end answers and are removed from prompts.
_SPACE = 220
_VISIBLE = range(94)  # The visible ASCII characters after the space, in order: `!` is 0.
_IDS = [id for id in range(VOCABULARY) if id not in _SPECIAL]
_READABLE = [*_VISIBLE, *[_SPACE] * 15]


def ids(chance: random.Random, count: int) -> list[int]:
    """Returns ids drawn from all that a prompt may hold."""
    return chance.choices(_IDS, k=count)


def readable(chance: random.Random, count: int) -> list[int]:
    """Returns ids that can also be sent as a text, which `text` makes of them."""
    made = chance.choices(_READABLE, k=count)
    # `<|` could begin the name of a special token.
    bar, less = ord("|") - 33, ord("<") - 33
    return [less if before == less and id == bar else id for before, id in zip([0, *made], made)]


def text(ids: list[int]) -> str:
    return "".join(" " if id == _SPACE else chr(33 + id) for id in ids)
