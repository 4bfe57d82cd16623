"""Calls a model by litellm: each case is a provider, and whether the answer is streamed."""

import os

import litellm
from outcomes import write_outcomes

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": "Say hello to the ship."}]


def call(provider, streamed):
    """Returns the text of an answer, and the tokens that its usage counts."""
    url, model = os.environ["CLIENTS_URL"], os.environ["CLIENTS_MODEL"]
    where = {"model": f"{provider}/{model}"}
    where["api_base"] = url if provider == "anthropic" else f"{url}/v1"
    if proxy := os.environ.get("CLIENTS_PROXY"):
        where = {"model": f"litellm_proxy/{provider}", "api_base": proxy}
    asked = dict(messages=MESSAGES, max_tokens=24, api_key="a key", num_retries=0, timeout=60)
    if not streamed:
        answer = litellm.completion(**where, **asked)
        return answer.choices[0].message.content, answer.usage.completion_tokens
    parts, tokens = [], 0
    options = {"include_usage": True}
    for chunk in litellm.completion(**where, **asked, stream=True, stream_options=options):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        if usage := getattr(chunk, "usage", None):
            tokens = usage.completion_tokens
    return "".join(parts), tokens


def run(case):
    provider, _, how = case.rpartition("-")
    text, tokens = call(provider, how == "streamed")
    assert text, "the answer has no text"
    assert 0 < tokens <= 24, f"completion tokens: {tokens}"


write_outcomes(run)
