"""Decides whether an engine can trim prompts, and whether it can trim the prompt of a request.

Trimming sends the engine only what the turn's session doesn't hold of a full history.
"""

from collections.abc import Sequence
from typing import Any

# A turn of a streaming session ignores these fields, or gives them another meaning than a request
# with the whole prompt does.
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
        # This process can't tell on which rank a session's KV is.
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
    """Adapts a fast tokenizer of `transformers` to `trim.Tokenizer`. Adds and drops nothing."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder
        # All added tokens, special or not (see `trim.Tokenizer`), but no `single_word` token: the
        # text around it decides whether the tokenizer splits there.
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
    """Adapts the engine's tokenizer, if it is a fast one; otherwise returns None. Then a prompt is
    trimmed only if it begins with the session's ids: no others are shown to be the same text."""
    return FastTokenizer(tokenizer) if getattr(tokenizer, "is_fast", False) else None
