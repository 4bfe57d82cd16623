"""Writes the integration suite's second model, for chats that resend their history.

It is a tiny random Llama whose answers survive being sent back, with a chat template for tools.

Its tokenizer is byte-level BPE with whole words and their beginnings, split as GPT-2 splits. A
greedy answer consists of tokens of visible ASCII, so its text comes back as the same bytes. Most
tokens are words with a space before them, which the tokenizer encodes as the model wrote them. Some
are parts of words, which may be encoded differently when they come back ("t", "he" as "the"). So
some answers come back in other ids, and none in other text. Now and then an answer ends by itself,
with the token that ends a turn.

    make_chat_model.py DIRECTORY
"""

import sys
from pathlib import Path

import numpy
from make_model import model_config, tokenizer_config, weights, write
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

BEGIN, END, TURN_BEGIN, TURN_END, CALL, CALL_END, THINK, THINK_END = SPECIAL = (
    "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>",
    "<tool_call>", "</tool_call>", "<think>", "</think>",
)
# Each word is a token with and without a space before it, and each of its beginnings is a token.
WORDS = (
    "the and for are but not you all any can her was one our out day get has him his how man new"
    " now old see two way who did its let put say she too use that with have this will your from"
    " they know want been good much some time very when come here just like long make many over"
    " such take than them well were user assistant system tool name weather arguments content"
).split()
# The gain of the token that ends a turn, so that one token in about twenty ends an answer, and the
# gain of parts of words, so that one in about thirty is such a part.
END_GAIN, PIECE_GAIN = 2.0, 0.6

CHAT_TEMPLATE = (
    "{% if tools %}" + TURN_BEGIN + "system{{ '\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "These tools are here:{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n' }}Call one by its name and arguments, between " + CALL + " and " + CALL_END + "."
    + TURN_END + "{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    + TURN_BEGIN + "{{ message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    + CALL + "{{ {'name': call['function']['name'],"
    " 'arguments': call['function']['arguments']} | tojson }}" + CALL_END
    + "{% endfor %}" + TURN_END + "{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + TURN_BEGIN + "assistant{{ '\n' }}{% endif %}"
)


def tokenizer() -> Tokenizer:
    pieces = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        beginnings = [(word[:length], word[length]) for length in range(1, len(word))]
        # `Ġ` stands for a space at the byte level.
        for merge in [*beginnings, ("Ġ", word)]:
            if merge not in merges:
                merges.append(merge)
                pieces.append("".join(merge))
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces), "two merges make the same token"
    made = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def answered(made: Tokenizer) -> numpy.ndarray:
    gains = numpy.zeros(made.get_vocab_size())
    for piece, id in made.get_vocab(with_added_tokens=False).items():
        letters = piece.removeprefix("Ġ")
        if letters.isascii() and letters.isprintable():
            whole = piece != letters and made.encode(f" {letters}").ids == [id]
            gains[id] = 1 if whole else PIECE_GAIN
    gains[made.token_to_id(TURN_END)] = END_GAIN
    return gains


def main() -> None:
    made = tokenizer()
    ends = {"bos_token_id": made.token_to_id(BEGIN), "eos_token_id": made.token_to_id(TURN_END)}
    vocabulary = made.get_vocab_size()
    files = {
        "tokenizer_config.json": tokenizer_config(BEGIN, TURN_END, CHAT_TEMPLATE),
        "config.json": model_config(vocabulary, ends),
        "generation_config.json": ends,
    }
    write(Path(sys.argv[1]), made, weights(vocabulary, answered(made)), files)


if __name__ == "__main__":
    main()
