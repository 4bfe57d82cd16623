"""Traces of coding agents in the form of kv-cache-tester, one file for each conversation."""

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 64
# A recorded conversation's requests that are replayed, and the longest prompt among them.
REQUESTS_MAX = 6
PROMPT_TOKENS_MAX = 120_000
CONVERSATIONS = 4


def made_agents(folder: Path) -> Path:
    """Writes small conversations, whose prompts grow by two blocks with each request."""
    for agent in range(CONVERSATIONS):
        requests = []
        for turn in range(REQUESTS_MAX):
            blocks = 4 + 2 * turn
            requests.append(_request(0.5 * turn, blocks * BLOCK_TOKENS, 8, list(range(1, blocks + 1))))
        _write(folder, f"made_{agent}", requests, BLOCK_TOKENS)
    return folder


def recorded_agents(recorded: Path, folder: Path) -> Path:
    """Writes the first requests of the first recorded conversations that are short enough."""
    with gzip.open(recorded, "rt") as lines:
        for trace in islice(map(json.loads, lines), CONVERSATIONS):
            requests = []
            for each in trace["requests"]:
                if each["type"] == "subagent" or each["in"] > PROMPT_TOKENS_MAX:
                    continue
                ids = [first + n for first, count in each["hash_rle"] for n in range(count)]
                # The times between requests are those of the recording, at most a second.
                requests.append(_request(len(requests), each["in"], min(each["out"], 32), ids))
                if len(requests) == REQUESTS_MAX:
                    break
            _write(folder, trace["id"], requests, trace["block_size"])
    return folder


def _request(seconds: float, prompt: int, answer: int, blocks: list[int]) -> dict[str, Any]:
    return {
        "t": seconds, "type": "s", "model": "recorded", "in": prompt, "out": answer,
        "hash_ids": blocks, "input_types": ["text"], "output_types": ["text"], "stop": "end_turn",
        "api_time": 0.1, "think_time": 0.1, "ttft": 0.05,
    }


def _write(folder: Path, name: str, requests: list[dict[str, Any]], block_tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trace = {
        "id": name, "models": ["recorded"], "block_size": block_tokens, "hash_id_scope": "local",
        "tool_tokens": 0, "system_tokens": 0, "requests": requests,
    }
    (folder / f"{name}.json").write_text(json.dumps(trace))
