"""Turns by each API of OpenAI's and Anthropic's own Python clients, streamed or not.

A history is a list of messages in the form of chat completions. Each API sends it in its own form,
as a framework for that API does.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai

from integration.fleet import MODEL

SECONDS_MAX = 60
KEY = "integration"
# The key that both clients send, as a header. A session belongs to the credential that opened it.
CREDENTIAL = {"authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class TurnOptions:
    """What a client asks for in one turn, besides the history."""

    tokens: int
    tools: tuple[dict, ...] = ()
    # Whether the model must call one of the tools.
    forced: bool = False
    stop: tuple[str, ...] = ()
    bias: dict[str, int] = field(default_factory=dict)
    # The form of the answer as a regular expression, an extension of SGLang.
    regex: str = ""


@dataclass(frozen=True)
class ClientAnswer:
    """An answer as the client received it. Some APIs give no token counts for an empty streamed
    answer; the counts are 0 then."""

    text: str
    thought: str
    # The name and the arguments of each tool call.
    calls: tuple[tuple[str, str], ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int


class Clients:
    """Both clients for one server; they send the same headers with each request."""

    def __init__(self, url: str, headers: dict[str, str]):
        # The headers of the last answer.
        self.headers: httpx.Headers = httpx.Headers()
        hooks = {"response": [self._answered]}
        fixed: dict[str, Any] = {
            "api_key": KEY, "max_retries": 0, "timeout": SECONDS_MAX, "default_headers": headers,
        }
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1",
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
            **fixed,
        )
        self.anthropic = anthropic.Anthropic(
            base_url=url, http_client=anthropic.DefaultHttpxClient(event_hooks=hooks), **fixed
        )

    def _answered(self, response: httpx.Response) -> None:
        self.headers = response.headers

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()

    def send(
        self, api: str, stream: bool, system: str, history: list[dict], options: TurnOptions
    ) -> ClientAnswer:
        return APIS[api](self, stream, system, history, options)


def chat(
    clients: Clients, stream: bool, system: str, history: list[dict], options: TurnOptions
) -> ClientAnswer:
    call = _sampling(options) | _stream(stream) | {
        "messages": [{"role": "system", "content": system}, *history],
    }
    if options.tools:
        functions = [{"type": "function", "function": tool} for tool in options.tools]
        call |= {"tools": functions, "tool_choice": "required" if options.forced else "auto"}
    answer = clients.openai.chat.completions.create(**call)
    if not stream:
        [choice] = answer.choices
        message = choice.message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        thought = getattr(message, "reasoning_content", None) or ""
        return _client_answer(message.content, thought, calls, choice.finish_reason, answer.usage)
    text, thought, finish, usage = "", "", "", None
    calls: dict[int, list[str]] = {}
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for delta in choice.delta.tool_calls or []:
                found = calls.setdefault(delta.index, ["", ""])
                found[0] += delta.function.name or ""
                found[1] += delta.function.arguments or ""
    return _client_answer(text, thought, calls.values(), finish, usage)


def completions(
    clients: Clients, stream: bool, system: str, history: list[dict], options: TurnOptions
) -> ClientAnswer:
    said = [f"\n{one['content']}\n" if one["role"] == "user" else one["content"] for one in history]
    # This route applies no chat template, so the client writes the begin token.
    prompt = f"<|bos|>{system}" + "".join(said)
    call = _sampling(options) | _stream(stream)
    answer = clients.openai.completions.create(prompt=prompt, **call)
    if not stream:
        [choice] = answer.choices
        return _client_answer(choice.text, "", (), choice.finish_reason, answer.usage)
    text, finish, usage = "", "", None
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    return _client_answer(text, "", (), finish, usage)


def responses(
    clients: Clients, stream: bool, system: str, history: list[dict], options: TurnOptions
) -> ClientAnswer:
    items: list[dict] = []
    for one in history:
        if one["role"] == "tool":
            output = {"call_id": one["tool_call_id"], "output": one["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if one["content"] or not one.get("tool_calls"):
            items.append({"role": one["role"], "content": one["content"]})
        for made in one.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": made["id"], **made["function"]})
    call: dict[str, Any] = {
        "model": MODEL, "temperature": 0, "instructions": system, "input": items, "store": False,
        "max_output_tokens": options.tokens, "stream": stream,
    }
    if options.tools:
        call["tools"] = [{"type": "function", **tool} for tool in options.tools]
        call["tool_choice"] = "required" if options.forced else "auto"
    answer = clients.openai.responses.create(**call)
    if stream:
        # The last event holds the whole response.
        *_, last = answer
        answer = last.response
    calls = [(one.name, one.arguments) for one in answer.output if one.type == "function_call"]
    usage = answer.usage
    cached = usage.input_tokens_details.cached_tokens if usage.input_tokens_details else 0
    return ClientAnswer(
        answer.output_text, "", tuple(calls), answer.status, usage.input_tokens, cached
    )


def messages(
    clients: Clients, stream: bool, system: str, history: list[dict], options: TurnOptions
) -> ClientAnswer:
    call: dict[str, Any] = {
        "model": MODEL, "system": system, "messages": _blocks(history),
        "max_tokens": options.tokens,
        # The client no longer has a parameter for the temperature; the engine still has one.
        "extra_body": {"temperature": 0},
    }
    if options.stop:
        call["stop_sequences"] = list(options.stop)
    if options.tools:
        call["tools"] = [
            {"name": tool["name"], "description": tool["description"],
             "input_schema": tool["parameters"], "strict": True}
            for tool in options.tools
        ]
        call["tool_choice"] = {"type": "any" if options.forced else "auto"}
    if stream:
        with clients.anthropic.messages.stream(**call) as events:
            answer = events.get_final_message()
    else:
        answer = clients.anthropic.messages.create(**call)
    text = "".join(block.text for block in answer.content if block.type == "text")
    used = [block for block in answer.content if block.type == "tool_use"]
    cached = answer.usage.cache_read_input_tokens or 0
    return ClientAnswer(
        text, "", tuple((block.name, json.dumps(block.input)) for block in used),
        answer.stop_reason, (answer.usage.input_tokens or 0) + cached, cached,
    )


def _blocks(history: list[dict]) -> list[dict]:
    """Returns the history in the form of Anthropic's API, where the results of tools are the
    user's."""
    made: list[dict] = []
    for one in history:
        role, blocks = one["role"], []
        if role == "tool":
            role = "user"
            used = {"tool_use_id": one["tool_call_id"], "content": one["content"]}
            blocks = [{"type": "tool_result", **used}]
        elif one["content"] or not one.get("tool_calls"):
            blocks = [{"type": "text", "text": one["content"]}]
        for call in one.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            used = {"id": call["id"], "name": name, "input": json.loads(arguments)}
            blocks.append({"type": "tool_use", **used})
        if made and made[-1]["role"] == role:
            made[-1]["content"] += blocks
        else:
            made.append({"role": role, "content": blocks})
    return made


def _sampling(options: TurnOptions) -> dict[str, Any]:
    call: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": options.tokens}
    call |= {"stop": list(options.stop)} if options.stop else {}
    call |= {"logit_bias": options.bias} if options.bias else {}
    return call | ({"extra_body": {"regex": options.regex}} if options.regex else {})


def _stream(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def _client_answer(
    text: str | None, thought: str, calls: Iterable[Any], finish: str, usage: Any
) -> ClientAnswer:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    calls = tuple((name, arguments) for name, arguments in calls)
    return ClientAnswer(text or "", thought, calls, finish, usage.prompt_tokens, cached)


APIS: dict[str, Callable[[Clients, bool, str, list[dict], TurnOptions], ClientAnswer]] = {
    "chat": chat, "completions": completions, "responses": responses, "messages": messages,
}
