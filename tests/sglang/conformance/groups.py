"""How the engines are launched: tests that can share flags share a launch.

The flags are SGLang's own; the simulator takes them with the same meaning.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from integration.processes import TIER_FLAGS, tier_env

ROWS = 8
POOL_TOKENS = 2048
CONTEXT_TOKENS = 1024
# The engine reserves six tokens of the context for itself.
INPUT_TOKENS_MAX = CONTEXT_TOKENS - 6

STREAMING = "--enable-streaming-session"
TAGS = "--enable-session-radix-cache"

EVENTS_KEPT = 100
TOPIC = "kv-events"
EVENTS = {"topic": TOPIC, "buffer_steps": EVENTS_KEPT}

# How much of a conversation's end `tlru` gives away, in tokens.
TLRU = {"threshold": 64, "next_prompt_estimate": 16}
# The groups with a host tier are named by SGLang's write policies.
TIERED = ("write_through", "write_through_selective", "write_back")


@dataclass(frozen=True)
class Group:
    """The settings of one launch."""

    name: str
    page_size: int
    more: tuple[str, ...]
    pool_tokens: int = POOL_TOKENS
    context_tokens: int = CONTEXT_TOKENS
    rows: int = ROWS
    chunk_tokens: int = 512
    env: dict[str, str] = field(default_factory=dict)
    # How KV events are published, without the endpoints; if empty, none are published.
    kv_events: dict[str, Any] = field(default_factory=dict)

    def flags(self) -> list[str]:
        return [
            "--page-size", str(self.page_size),
            "--max-total-tokens", str(self.pool_tokens),
            "--context-length", str(self.context_tokens),
            "--max-running-requests", str(self.rows),
            "--chunked-prefill-size", str(self.chunk_tokens),
            *self.more,
        ]


GROUPS = {
    group.name: group
    for group in (
        Group("page16", 16, (STREAMING,), kv_events=EVENTS),
        # At this conservativeness, admission counts on short answers and reserves little for them.
        # Only then can a decode run out of KV.
        Group(
            "page1", 1, (STREAMING, "--schedule-conservativeness", "0.02"), kv_events=EVENTS,
        ),
        Group("tagged", 16, (TAGS,)),
        Group("stored", 16, ("--enable-response-store",)),
        Group("both", 16, (STREAMING, TAGS), kv_events=EVENTS),
        # SGLang's own kit for aborts under chunked prefill uses these sizes.
        Group(
            "page256", 256, (STREAMING,), pool_tokens=16384, context_tokens=512, rows=16,
            chunk_tokens=4096,
        ),
        Group(
            "retract", 16, (STREAMING,), pool_tokens=16384, context_tokens=2048, rows=16,
            env={"SGLANG_TEST_RETRACT": "true"},
        ),
        Group(
            "priority", 16,
            (TAGS, "--enable-priority-scheduling", "--radix-eviction-policy", "priority"),
            kv_events=EVENTS,
        ),
        Group(
            "tlru", 16,
            (
                TAGS, "--radix-eviction-policy", "tlru",
                "--radix-eviction-policy-config", json.dumps(TLRU),
            ),
            kv_events=EVENTS,
        ),
        *(
            Group(
                policy, 16,
                (
                    STREAMING, TAGS, *TIER_FLAGS, "--hicache-ratio", "2",
                    "--hicache-write-policy", policy,
                ),
                kv_events=EVENTS, env=tier_env({}),
            )
            for policy in TIERED
        ),
    )
}


def in_groups(*names: str) -> pytest.MarkDecorator:
    """Returns a decorator: the test runs at the engine of each of these groups."""
    return pytest.mark.parametrize("engine", names, indirect=True)
