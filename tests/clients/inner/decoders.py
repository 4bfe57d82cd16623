"""Reads refusals and streams with the clients and decoders of Python, and with curl."""

import asyncio
import http.client
import json
import os
import subprocess
import urllib.parse

from outcomes import write_outcomes

URL, MODEL = os.environ["CLIENTS_URL"], os.environ["CLIENTS_MODEL"]
LARGE = b"x" * 5_000_000
REFUSALS = 20
ANSWER_TOKENS = 16


def asked(case):
    """Returns the messages of a prompt that no other case has, so that it is computed anew."""
    return [{"role": "user", "content": f"{case} of Python: " + "say hello to the ship. " * 120}]


def chat_body(case):
    body = {"model": MODEL, "messages": asked(case), "max_tokens": ANSWER_TOKENS, "stream": True}
    return json.dumps(body)


def check(texts):
    assert len(texts) > 1 and any(texts), f"the stream's texts: {texts}"


def refuse_http_client(_):
    place = urllib.parse.urlsplit(URL)
    for _ in range(REFUSALS):
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        connection.request("POST", "/no/such/route", LARGE)
        answer = connection.getresponse()
        assert answer.status == 404 and json.loads(answer.read())["error"], answer.status
        connection.close()


def see_comments(case):
    """Shows that the streams of this fleet have comments, which the other cases must pass over."""
    place = urllib.parse.urlsplit(URL)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", chat_body(case), headers)
    text = connection.getresponse().read().decode()
    assert text.count(": waiting\n") > 2, text[:500]
    assert text.endswith("data: [DONE]\n\n"), text[-200:]


def curl(*arguments, body):
    made = subprocess.run(
        ["curl", "--silent", "--show-error", "--data-binary", "@-", *arguments],
        input=body, capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr
    return made.stdout.decode()


def refuse_curl(_):
    for _ in range(REFUSALS):
        text = curl("--write-out", "\n%{http_code}", f"{URL}/no/such/route", body=LARGE)
        assert text.endswith("\n404"), text


def read_curl(case):
    headers = ("--no-buffer", "--header", "content-type: application/json")
    text = curl(*headers, f"{URL}/v1/chat/completions", body=chat_body(case).encode())
    assert text.endswith("data: [DONE]\n\n"), text[-200:]


def openai_keys():
    return {"base_url": f"{URL}/v1", "api_key": "a key", "max_retries": 0, "timeout": 60}


def read_openai(case):
    import openai

    stream = openai.OpenAI(**openai_keys()).chat.completions.create(**json.loads(chat_body(case)))
    check([choice.delta.content for chunk in stream for choice in chunk.choices])


def read_openai_responses(case):
    import openai

    stream = openai.OpenAI(**openai_keys()).responses.create(
        model=MODEL, input=asked(case), max_output_tokens=ANSWER_TOKENS, stream=True)
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds


def read_openai_async(case):
    import openai

    async def read():
        client = openai.AsyncOpenAI(**openai_keys())
        stream = await client.chat.completions.create(**json.loads(chat_body(case)))
        return [choice.delta.content async for chunk in stream for choice in chunk.choices]

    check(asyncio.run(read()))


def read_anthropic(case):
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="a key", max_retries=0, timeout=60)
    about = {"model": MODEL, "messages": asked(case), "max_tokens": ANSWER_TOKENS}
    with client.messages.stream(**about) as stream:
        check(list(stream.text_stream))


def read_langchain(case):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, max_tokens=ANSWER_TOKENS, **openai_keys())
    check([chunk.text for chunk in model.stream(asked(case)[0]["content"])])


def read_langchain_anthropic(case):
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model=MODEL, max_tokens=ANSWER_TOKENS, base_url=URL, api_key="a key", max_retries=0)
    check([chunk.text for chunk in model.stream(asked(case)[0]["content"])])


def read_httpx_sse(case):
    import httpx
    from httpx_sse import connect_sse

    with httpx.Client(timeout=60) as client:
        about = {"content": chat_body(case), "headers": {"content-type": "application/json"}}
        with connect_sse(client, "POST", f"{URL}/v1/chat/completions", **about) as source:
            events = [event.data for event in source.iter_sse()]
    assert events[-1] == "[DONE]", events
    check([json.loads(event)["choices"] for event in events[:-1]])


CASES = {
    "http.client-refused": refuse_http_client,
    "http.client-comments": see_comments,
    "curl-refused": refuse_curl,
    "curl-chat": read_curl,
    "openai-chat": read_openai,
    "openai-responses": read_openai_responses,
    "openai-async-chat": read_openai_async,
    "anthropic-messages": read_anthropic,
    "langchain-openai-chat": read_langchain,
    "langchain-anthropic-messages": read_langchain_anthropic,
    "httpx-sse-chat": read_httpx_sse,
}


write_outcomes(lambda case: CASES[case](case))
