"""Gives SGLang's kits the address of a running server, and nothing else.

The kits are mixins: SGLang's tests add to each a class that starts a server.
"""

import json
import os
import unittest
from pathlib import Path

import requests
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin,
)
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin


class EngineProcess:
    """Stands for the server's process, which the kits only ask whether it lives."""

    def poll(self):
        try:
            os.kill(int(os.environ["CLIENTS_ENGINE_PID"]), 0)
        except ProcessLookupError:
            return 1
        return None


class Server(unittest.TestCase):
    """The server of a kit, which runs already."""

    @classmethod
    def setUpClass(cls):
        cls.base_url = os.environ["CLIENTS_URL"]
        cls.model = os.environ["CLIENTS_MODEL"]
        cls.served_model_name = cls.model
        cls.api_key = "a key"
        cls.process = EngineProcess()
        cls.model_path = os.environ["CLIENTS_MODEL_PATH"]
        cls.tokenizer = get_tokenizer(cls.model_path)


class TestApiContract(BasicAPIContractMixin, Server):
    pass


class TestAnthropic(AnthropicMessagesMixin, Server):
    pass


class TestAbortAll(AbortAllMixin, Server):
    # A request that comes after the abort runs for a minute. On a busy machine some come late.
    abort_all_sleep = 5


class TestWaitingTimeout(WaitingTimeoutMixin, Server):
    pass


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, Server):
    pass


class TestPause(PauseResumeInPlaceMixin, Server):
    # As many as run at once; the tiny model is fast, so the answers are long.
    pause_num_requests = 16
    pause_max_new_tokens = 1500
    pause_ignore_eos = True


class TestPrefixBranching(PrefixCacheBranchingMixin, Server):
    cache_chunk_size = 64

    @classmethod
    def flush_cache(cls):
        requests.post(cls.base_url + "/flush_cache").raise_for_status()


class TestStreamingSession(StreamingSessionKitMixin, Server):
    pass


class TestAbortLeak(AbortLeakReproKitMixin, Server):
    pass


class TestCacheHit(Server):
    def test_multiturn_cache_hit(self):
        folder = Path(os.environ["HOME"])
        run_multiturn_cache_hit_test(
            self.base_url, self.model_path, num_clients=4, num_rounds=3, request_length=128,
            output_length=16, dataset_path=str(conversations(folder)),
        )


def conversations(folder):
    """Writes a small file of conversations in ShareGPT's form, from which prompts are drawn."""
    words = "the and for are but not you all any can her was one our out day get has him".split()
    turns = [
        [{"from": who, "value": " ".join(words[(n * k + j) % len(words)] for j in range(60))}
         for k, who in ((1, "human"), (7, "gpt"))]
        for n in range(64)
    ]
    path = folder / "conversations.json"
    path.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    return path


