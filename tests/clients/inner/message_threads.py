"""Uses the message threads of the anthropic library, and its tool runner."""

import os

import anthropic
from outcomes import write_outcomes

FIRST = {"role": "user", "content": "Say hello to each of the ships, and to their masters. " * 8}
NEXT = {"role": "user", "content": "And then?"}
TURNS = 4
ASKED = {"model": os.environ["CLIENTS_MODEL"], "max_tokens": 16}


def prompt_tokens(message):
    assert message.content, f"no answer: {message}"
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def use_thread(client):
    # What the tool runner asks for: the library's own default is to raise an error.
    thread = client.beta.messages.thread(**ASKED, unsupported_request_behavior="continue_unthreaded")
    counts = [prompt_tokens(thread.send(FIRST))]
    counts += [prompt_tokens(thread.send(NEXT)) for _ in range(TURNS - 1)]
    assert all(one < next for one, next in zip(counts, counts[1:])), (
        f"the tokens of the prompts, each of which must hold the one before: {counts}"
    )


def use_runner(client, streamed):
    runner = client.beta.messages.tool_runner(**ASKED, tools=[], messages=[FIRST], stream=streamed)
    # Without a tool call, it ends after one turn.
    [turn] = [turn.get_final_message() if streamed else turn for turn in runner]
    prompt_tokens(turn)


def run(case):
    url = os.environ["CLIENTS_URL"]
    client = anthropic.Anthropic(base_url=url, api_key="a key", max_retries=0, timeout=60)
    if case == "thread":
        use_thread(client)
    else:
        use_runner(client, case == "runner-streamed")


write_outcomes(run)
