"""Writes the integration suite's model: a tiny random Llama whose tokenizer has a token per byte.

Three properties make it good for tests. One byte is one token and nothing is added in front, so a
test can say exactly how long a prompt is. The weights are the same wherever they are made, so a
greedy answer is the same on every engine. And an answer depends on every token before it, so a
session that runs on a wrong context gives another answer. With the weights that the engine's
`--load-format dummy` makes, all contexts with the same end get the same answer.

Token ids: 0 to 255 are the bytes, 256 to 259 the special tokens, 260 to 319 have no text. A byte's
id is its position in the sorted byte alphabet: `!` is 0, `0` is 15, `h` is 71. A greedy answer
consists of the ids below 94, the visible ASCII characters, and never ends by itself.

    make_model.py DIRECTORY
"""

import json
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SEED = 21
VOCABULARY = 320
ANSWERED = 94
LAYERS = 2
HIDDEN = 64
INTERMEDIATE = 128
HEADS = 4
KV_HEADS = 2
HEAD = 16
CONTEXT = 4096
# In the order of their ids, which begin at 256.
BEGIN, END, TURN_BEGIN, TURN_END = SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
ENDS = {"bos_token_id": 256, "eos_token_id": 257}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + TURN_BEGIN + "{{ message['role'] }}\n{{ message['content'] }}" + TURN_END + "\n"
    + "{% endfor %}"
    + "{% if add_generation_prompt %}" + TURN_BEGIN + "assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    bytes_by_id = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={byte: id for id, byte in enumerate(bytes_by_id)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    assert made.token_to_id(BEGIN) == ENDS["bos_token_id"]
    return made


def tokenizer_config(begin: str = BEGIN, end: str = END, template: str = CHAT_TEMPLATE) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def model_config(vocabulary: int, ends: dict) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_cache": True,
        **ends,
    }


def weights(vocabulary: int, answered: numpy.ndarray) -> dict:
    """Returns the weights. `answered` says how readily each token id is answered: 0 is never, 1
    is usual."""
    random = numpy.random.Generator(numpy.random.PCG64(SEED))

    def matrix(rows: int, columns: int, gain: float = 2.0) -> numpy.ndarray:
        scale = gain / columns**0.5
        return (random.standard_normal((rows, columns)) * scale).astype(numpy.float32)

    ones = numpy.ones(HIDDEN, dtype=numpy.float32)
    made = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(vocabulary, HIDDEN, gain=1.0),
    }
    # The greedy choice is the largest logit, so an id whose logit is always zero is never chosen.
    made["lm_head.weight"] *= answered.astype(numpy.float32)[:, None]
    made["lm_head.weight"][answered == 0] = 0
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        made |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
            # With a smaller gain, attention averages a long context until all answers to it are
            # alike. With this gain, one changed token among 450 shows within about 10 tokens.
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, gain=4.0),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, gain=4.0),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return made


def write(directory: Path, made: Tokenizer, weights: dict, files: dict[str, dict]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    files = {
        "tokenizer_config.json": tokenizer_config(),
        "config.json": model_config(VOCABULARY, ENDS),
        "generation_config.json": ENDS,
    }
    answered = numpy.arange(VOCABULARY) < ANSWERED
    write(Path(sys.argv[1]), tokenizer(), weights(VOCABULARY, answered), files)


if __name__ == "__main__":
    main()
