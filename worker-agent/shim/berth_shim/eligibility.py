"""Decides whether an engine can trim prompts, and whether it can trim the prompt of a request.

Trimming sends the engine only the part of a full history that the turn's session doesn't hold.
`trimmer` asks here why an engine or a request can't be trimmed, and gets a reason or an empty
string. The module `trim` compares a prompt with the session's history. That needs a tokenizer, so
this module also adapts the engine's tokenizer to the interface `trim.Tokenizer`.
"""

from collections.abc import Sequence
from typing import Any

# A tokenized request with any of these fields can't be trimmed. A turn of a streaming session
# ignores these fields, or gives them another meaning than a request with the whole prompt does.
_UNSUPPORTED_FIELDS = (
    "mm_inputs", "input_embeds", "token_type_ids", "positional_embed_overrides", "kv_hints",
    "multi_item_delimiter_indices", "token_indices_to_pool", "return_indexer_topk",
    "return_flat_raw_top_logprobs", "return_hidden_states", "return_routed_experts",
    "session_params",
)


def engine_refusal() -> str:
    """Returns why nothing can be trimmed in this engine; empty if trimming is possible."""
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

    serving, parallel = get_serving(), get_parallel()
    # SGLang 0.5.20 counts the DP ranks in `dp_size`.
    dp_ranks = getattr(parallel, "num_dp_ranks", None) or parallel.dp_size
    reasons = {
        "streaming sessions are off": not serving.enable_streaming_session,
        # Each tokenizer worker would see only some of a session's turns.
        "there are several tokenizer workers": serving.tokenizer_worker_num > 1,
        # A session's KV is on one of the ranks, and this process can't tell on which.
        "there are several DP ranks": dp_ranks > 1,
        "prefill and decode are apart": get_disagg().disaggregation_mode != "null",
        "prompts are truncated": serving.allow_auto_truncate,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def request_refusal(tokenized: Any) -> str:
    """Returns why this request can't be trimmed; empty if it can."""
    if tokenized.input_ids is None:
        return "it has no token ids"
    for field in _UNSUPPORTED_FIELDS:
        if getattr(tokenized, field, None):
            return f"it has {field}"
    if tokenized.return_logprob and (tokenized.logprob_start_len or 0) >= 0:
        return "it wants the prompt's log probabilities"
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        return "it is a beam search"
    return ""


def cache_namespace(tokenized: Any) -> tuple:
    """Returns what the request's KV depends on besides its tokens: adapter, extra key and salt."""
    return tokenized.lora_id, tokenized.extra_key, tokenized.cache_salt


class FastTokenizer:
    """Adapts a fast tokenizer of `transformers` to `trim.Tokenizer`. It encodes and decodes without
    adding or dropping any token or space.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder
        # See `trim.Tokenizer`. These are all added tokens, special or not. A `single_word` token is
        # left out, because the text around it decides whether the tokenizer splits there.
        self.split_ids = frozenset(
            id for id, token in added_tokens.items() if not token.single_word
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> str | None:
        pieces = self._tokenizer.convert_ids_to_tokens(list(ids))
        return None if None in pieces else "".join(pieces)


def fast_tokenizer(tokenizer: Any) -> FastTokenizer | None:
    """Adapts the engine's tokenizer, if it is a fast one. Returns None for any other tokenizer.
    With None, a prompt is trimmed only if it begins with the session's token ids. It can't be shown
    then that other ids stand for the same text."""
    return FastTokenizer(tokenizer) if getattr(tokenizer, "is_fast", False) else None
