"""A pair of engines: one in prefill mode computes prompts and hands their KV to one in decode mode.

Both get each request at once, with the room by which they find each other. The real engines hand
their KV over by Mooncake over TCP.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.engine import PAIR_PORTS, PORTS, Engine, Flow, Pending, Reply, body, ids
from conformance.groups import Group
from integration import wire
from integration.hand_off import DECODE_FLAGS, PREFILL_FLAGS, pair_env
from integration.processes import free_ports
from integration.turns import new_id

# How long an engine waits for the other one.
WAIT_SECONDS = 10
# A bootstrap room's place in the list of ranks: all of them, or one that no engine has.
ALL = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
ABSENT = "prefill_dp_rank=5&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"

pytestmark = pytest.mark.pairs


@dataclass
class Pair:
    """A prefill and a decode engine, real or simulated."""

    prefill: Engine
    decode: Engine
    bootstrap_port: int
    _rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    @property
    def bootstrap_url(self) -> str:
        return f"http://127.0.0.1:{self.bootstrap_port}"

    def meet(self, request: dict) -> dict:
        """Returns the request with a room of its own."""
        return {
            **request, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self._rooms),
        }

    def turn(self, request: dict) -> tuple[Reply, Reply]:
        """Sends a request to both engines, and returns both answers."""
        request = self.meet(request)
        prefill = Pending(lambda: self.prefill.generate(request))
        decode = self.decode.generate(request)
        return prefill.end(), decode

    def fails(self, engine: Engine, request: dict, message: str) -> None:
        """Checks that an engine alone answers a request with this error, plain and streamed."""
        plain, streamed = ({**self.meet(request), "rid": new_id("alone")} for _ in range(2))
        flow = Flow(wire.stream(f"{engine.url}/generate", {**streamed, "stream": True}))
        reply = engine.generate(plain)
        assert (reply.status, general(reply.body["message"], plain)) == (500, message), "the error"
        end = flow.end().finish
        found = (end["type"], end["status_code"], general(end["message"], streamed))
        assert found == ("abort", 500, message), "the end of the stream"


def general(message: str, request: dict) -> str:
    """Returns an error's text without the request's id, its room and the seconds it took."""
    message = message.replace(request["rid"], "RID").replace(str(request["bootstrap_room"]), "ROOM")
    return re.sub(r"after [\d.]+s", "after Ns", message)


def prompt(salt: int, tokens: int = 70) -> dict:
    return body(ids(tokens, salt), 8)


@pytest.fixture(scope="module")
def pair(pytestconfig: pytest.Config, folder: Path) -> Iterator[Pair]:
    program = pytestconfig.option.engine_sim
    given = getattr(pytestconfig, "workerinput", {}).get("port")
    first = given + PORTS if given else free_ports(PAIR_PORTS)[0]
    prefill_port, decode_port, bootstrap_port = first, first + PORTS, first + 2 * PORTS
    # The simulator has one flag for what the engine reads from its environment.
    limits = ("--bootstrap-timeout-ms", str(WAIT_SECONDS * 1000)) if program else ()
    env = pair_env(WAIT_SECONDS)
    bootstrap = ("--disaggregation-bootstrap-port", str(bootstrap_port))
    cpu = ((), ()) if program else (PREFILL_FLAGS, DECODE_FLAGS)
    engines = [
        Engine(
            Group(mode, 16, ("--disaggregation-mode", mode, *bootstrap, *limits, *more), env=env),
            folder, port, program, [],
        )
        for mode, port, more in (
            ("prefill", prefill_port, cpu[0]), ("decode", decode_port, cpu[1])
        )
    ]
    try:
        # A start takes half a minute, most of it imports, so both start at once.
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield Pair(engines[0], engines[1], bootstrap_port)
    finally:
        for engine in engines:
            engine.stop()


def test_the_description_of_each_half(pair: Pair) -> None:
    for engine, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        info = engine.get("/server_info").json()
        expected = {
            "disaggregation_mode": mode,
            "disaggregation_bootstrap_port": pair.bootstrap_port,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_enable_radix_cache": False,
            "kv_cache_dtype": "auto",
            "page_size": 16,
            "tp_size": 1,
            "dp_size": 1,
            "load_balance_method": {"prefill": "follow_bootstrap_room"}.get(mode, "round_robin"),
        }
        assert {key: info.get(key) for key in expected} == expected, f"a {mode} engine"
        assert info["internal_states"][0]["memory_usage"]["kvcache"] > 0, "the pool's size"
        assert engine.load()["disaggregation"]["mode"] == mode, "the mode in the loads"


def test_the_bootstrap_server(pair: Pair) -> None:
    url = pair.bootstrap_url
    assert wire.get(f"{url}/health").body == b"OK", "its health"
    topology = wire.get(f"{url}/route?{ALL}").json()
    expected = {
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1,
        "kv_cache_dtype": "auto", "follow_bootstrap_room": True,
        "decode_allocation_policy": "early",
    }
    assert {key: topology.get(key) for key in expected} == expected, "the topology"
    missing = wire.get(f"{url}/route")
    found = (missing.status, missing.body)
    assert found == (400, b"Missing inputs for bootstrap server."), "no place"
    absent = wire.get(f"{url}/route?{ABSENT}")
    message = b"Bootstrap info not found for dp_rank=5 cp_rank=0 tp_rank=0 pp_rank=0"
    assert (absent.status, absent.body) == (404, message), "a rank that isn't there"


def test_the_decode_engine_continues_with_the_prompt_s_kv(pair: Pair) -> None:
    for request in (prompt(1), prompt(1), prompt(2, 600)):
        prefill, decode = (reply.good() for reply in pair.turn(request))
        assert (prefill.completion, decode.completion) == (1, 8), "answered tokens"
        assert prefill.output == decode.output[:1], "the first token is the prefill engine's"
        assert prefill.prompt == decode.prompt == len(request["input_ids"]), "prompt tokens"


def test_a_prompt_that_the_prefill_engine_has(pair: Pair) -> None:
    pair.turn(prompt(3))
    prefill, decode = (reply.good() for reply in pair.turn(prompt(3)))
    assert (prefill.cached, decode.cached) == (64, 64), "cached tokens: those of the prefill engine"


def test_log_probabilities_of_the_prompt_are_the_prefill_engine_s(pair: Pair) -> None:
    request = {**prompt(4, 20), "return_logprob": True, "logprob_start_len": 0}
    prefill, decode = (reply.good() for reply in pair.turn(request))
    assert len(prefill.meta["input_token_logprobs"]) == 20, "those of the prefill engine"
    assert not decode.meta["input_token_logprobs"], "those of the decode engine"


def test_a_request_without_a_room(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        reply = engine.generate({**prompt(5), "rid": "lost"})
        message = (
            "Invalid request: Disaggregated request received without bootstrap room id. "
            "req.rid='lost'"
        )
        assert (reply.status, reply.error) == (400, message), "the refusal"


def test_health_requests_hand_nothing_over(pair: Pair) -> None:
    fake = {**prompt(6), "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    assert pair.prefill.generate(fake).good().completion == 1, "at the prefill engine"
    assert pair.decode.generate(fake).good().completion == 8, "at the decode engine"


def test_a_half_alone_gives_up(pair: Pair) -> None:
    error = "KVTransferError(bootstrap_room=ROOM): Request ROOM timed out after Ns in KVPoll."
    pair.fails(
        pair.prefill, prompt(7),
        "Prefill bootstrap failed for request rank=0 req.rid='RID' req.bootstrap_room=ROOM "
        f"with exception {error}Bootstrapping",
    )
    pair.fails(
        pair.decode, prompt(8),
        "Decode transfer failed for request rank=0 decode_req.req.rid='RID' "
        f"decode_req.req.bootstrap_room=ROOM with exception {error}WaitingForInput",
    )


def test_an_abort_of_a_half_that_waits(pair: Pair) -> None:
    for engine, stages, name in (
        (pair.prefill, ["Prefill bootstrap"], "req"),
        # The abort may come before the hand-off of the KV has begun.
        (pair.decode, ["Decode handshake", "Decode transfer"], "decode_req.req"),
    ):
        request = {**pair.meet(prompt(9)), "rid": new_id("waits")}
        pending = Pending(lambda: engine.generate(request))

        def aborted() -> bool:
            engine.abort(request["rid"])
            return pending.done()

        engine.until("aborted", aborted)
        reply = pending.end()
        messages = [
            f"{stage} failed for request rank=0 {name}.rid='RID' {name}.bootstrap_room=ROOM "
            "with exception KVTransferError(bootstrap_room=ROOM): Aborted by AbortReq."
            for stage in stages
        ]
        assert reply.status == 500, stages
        assert general(reply.body["message"], request) in messages, stages


def test_the_messages_api_reads_the_room_from_the_body(pair: Pair) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    request = pair.meet({"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0})
    prefill = Pending(lambda: Reply.from_answer(pair.prefill.post("/v1/messages", request)))
    decode = Reply.from_answer(pair.decode.post("/v1/messages", request))
    assert (prefill.end().status, decode.status) == (200, 200), f"the statuses, {decode}"
    tokens = [reply.body["usage"]["output_tokens"] for reply in (prefill.end(), decode)]
    assert tokens == [1, 6], "answered tokens"


def test_a_rank_that_the_engine_has_not(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        reply = engine.generate({**pair.meet(prompt(11)), "routed_dp_rank": 1})
        assert (reply.status, reply.error) == (400, "routed_dp_rank=1 out of range [0, 1)")


def test_failures_leave_nothing_behind(pair: Pair) -> None:
    prefill, decode = (reply.good() for reply in pair.turn(prompt(10)))
    assert decode.output[:1] == prefill.output, "a turn after all failures"
    for engine in (pair.prefill, pair.decode):
        engine.until_used(0, "what failed turns hold")
