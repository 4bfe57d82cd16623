"""Turns without a session pass through, on every route and by the clients that people use."""

import json
import socket
from urllib.parse import urlsplit

import anthropic
import openai

from integration import wire
from integration.fleet import MODEL, WORKER, Fleet
from integration.turns import chat_tokens, generate, generate_at_engine

QUESTION = [{"role": "user", "content": "What is a berth?"}]
# The client no longer has a parameter for the temperature; the engine still has one.
MESSAGE = dict(model=MODEL, messages=QUESTION, max_tokens=9, extra_body={"temperature": 0})


def openai_client(fleet: Fleet) -> openai.OpenAI:
    base = f"{fleet.router_url}/v1"
    return openai.OpenAI(base_url=base, api_key="integration", max_retries=0, timeout=60)


def anthropic_client(fleet: Fleet) -> anthropic.Anthropic:
    base = fleet.router_url
    return anthropic.Anthropic(base_url=base, api_key="integration", max_retries=0, timeout=60)


def test_a_generate_turn(fleet: Fleet) -> None:
    turn = generate(fleet, "Ships lie here.", 12)
    assert turn.prompt_tokens == 15, "prompt tokens"
    direct = generate_at_engine(fleet, "Ships lie here.", 12)
    assert turn.output_ids == direct.output_ids, "the answer"


def test_a_chat_turn_by_the_openai_client(fleet: Fleet) -> None:
    answer = openai_client(fleet).chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.prompt_tokens == chat_tokens(QUESTION), "prompt tokens"
    assert answer.usage.completion_tokens == 9, "completion tokens"
    assert len(answer.choices[0].message.content) == 9, "the answer's length"


def test_a_streamed_chat_turn_by_the_openai_client(fleet: Fleet) -> None:
    client = openai_client(fleet)
    call = dict(model=MODEL, messages=QUESTION, max_tokens=9, temperature=0)
    whole = client.chat.completions.create(**call).choices[0].message.content
    parts, usage = [], None
    stream = client.chat.completions.create(
        **call, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == whole, "the streamed answer"
    assert usage.prompt_tokens == chat_tokens(QUESTION), "prompt tokens"


def test_a_completion_by_the_openai_client(fleet: Fleet) -> None:
    answer = openai_client(fleet).completions.create(
        model=MODEL, prompt="Ships lie here.", max_tokens=12, temperature=0
    )
    assert answer.usage.prompt_tokens == 15, "prompt tokens"
    direct = generate_at_engine(fleet, "Ships lie here.", 12)
    assert answer.choices[0].text == direct.text, "the answer"


def test_a_message_by_the_anthropic_client(fleet: Fleet) -> None:
    answer = anthropic_client(fleet).messages.create(**MESSAGE)
    usage = answer.usage
    read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert read == chat_tokens(QUESTION), "prompt tokens"
    assert usage.output_tokens == 9, "completion tokens"


def test_a_streamed_message_by_the_anthropic_client(fleet: Fleet) -> None:
    client = anthropic_client(fleet)
    whole = client.messages.create(**MESSAGE).content[0].text
    with client.messages.stream(**MESSAGE) as stream:
        assert "".join(stream.text_stream) == whole, "the streamed answer"


def test_the_models(fleet: Fleet) -> None:
    assert [model.id for model in openai_client(fleet).models.list()] == [MODEL], "the models"


def test_the_workers(fleet: Fleet) -> None:
    answer = wire.get(f"{fleet.router_url}/v1/workers")
    assert answer.status == 200, f"the status of {answer}"
    assert f'"{WORKER}' in answer.body.decode(), f"no worker {WORKER!r} in {answer}"


def test_flags_in_other_forms_mean_to_berth_what_they_mean_to_the_engine(fleet: Fleet) -> None:
    bodies = {
        "/generate": {"text": "Ships", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
        "/v1/chat/completions": {"model": MODEL, "messages": QUESTION, "max_tokens": 2},
        "/v1/messages": {"model": MODEL, "messages": QUESTION, "max_tokens": 2},
    }
    forms = [True, "true", 1, 1.0, "On", "y", False, "false", 0, "OFF", None, 2, "perhaps", [], {}]
    differ = []
    for path, body in bodies.items():
        for form in forms:
            shown = []
            for url in (fleet.engine_url, fleet.router_url):
                answer = wire.post(f"{url}{path}", {**body, "stream": form})
                shown.append((answer.status, answer.headers["content-type"].split(";")[0]))
            if shown[0] != shown[1]:
                differ.append(f"{path} {form!r}: engine {shown[0]}, router {shown[1]}")
    assert not differ, "\n".join(differ)


def test_a_turn_that_would_run_on_without_its_client_is_refused(fleet: Fleet) -> None:
    body = {"text": "Ships", "sampling_params": {"max_new_tokens": 2}}
    for form in (True, "true", 1, "on"):
        answer = wire.post(f"{fleet.router_url}/generate", {**body, "background": form})
        assert answer.headers.get("x-berth-refusal") == "background_unsupported", f"{form!r}: {answer}"
    assert wire.post(f"{fleet.router_url}/generate", {**body, "background": "no"}).status == 200


def test_a_client_that_closes_its_sending_side_counts_as_gone_here_as_there(fleet: Fleet) -> None:
    """TCP doesn't show the difference between closing one side and closing both."""

    def answer_after_half_close(url: str) -> bytes:
        sampling = {"max_new_tokens": 200, "ignore_eos": True}
        body = json.dumps({"text": "Ships lie here.", "sampling_params": sampling})
        parts = urlsplit(url)
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection((parts.hostname, parts.port), timeout=60) as client:
            client.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
            client.shutdown(socket.SHUT_WR)
            return client.recv(1024)

    assert answer_after_half_close(fleet.engine_url) == b"", "the engine answers"
    assert answer_after_half_close(fleet.router_url) == b"", "Berth answers, and the engine doesn't"
