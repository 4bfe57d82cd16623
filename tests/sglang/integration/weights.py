"""Updates of the weights during pinned conversations: no answer continues KV of older weights.

Three checkpoints with other weights follow the engine's own. While conversations go on, the engine
loads one after the other through the router. Each answer names its weights. At the end, the engine
answers each prompt anew on those weights, with an empty cache: tokens and log probabilities must
be the same. KV of older weights changes them.

`BERTH_WEIGHTS_CONVERSATIONS` is the number of conversations (default 4). More than the suite's
engine has rows for get an engine of their own.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file, save_file

from integration import wire
from integration.fleet import (
    CONTEXT_TOKENS, ROWS, SETTLE_SECONDS_MAX, Fleet, engine_home, free_addresses,
)
from integration.processes import wait_until
from integration.turns import body, delete_session, new_id, open_session, refusal_code

CONVERSATIONS = int(os.environ.get("BERTH_WEIGHTS_CONVERSATIONS", "4"))
UPDATES = 3
ANSWER_TOKENS = 12
# Rows that no conversation takes: the agent's reserve, and the test's own turns.
ROWS_LEFT = 4
# Float sums in another order give other last digits. Stale KV changes the second digit.
LOG_PROBABILITY_ERROR_MAX = 2e-3


@dataclass
class Answered:
    """An answer of a conversation: the whole prompt before it, and what the engine said."""

    epoch: int
    prompt: str
    output_ids: list[int]
    log_probabilities: list[float]


def checkpoints(folder: Path) -> list[Path]:
    """Returns the engine's model, and copies of it with other weights."""
    own = (engine_home() / "model").resolve()
    made = [own]
    for number in range(1, UPDATES + 1):
        copy = folder / f"model-{number}"
        shutil.copytree(own, copy, dirs_exist_ok=True)
        random = numpy.random.default_rng(number)
        tensors = load_file(own / "model.safetensors")
        for name, tensor in tensors.items():
            # The other parts decide which tokens may be answered at all.
            if "self_attn" in name or "mlp" in name:
                tensors[name] = numpy.ascontiguousarray(random.permutation(tensor))
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        made.append(copy)
    return made


@contextmanager
def room_for_all(fleet: Fleet) -> Iterator[None]:
    """Gives the fleet an engine with rows and KV for all conversations, if its own has too few."""
    if CONVERSATIONS <= ROWS - ROWS_LEFT:
        yield
        return
    fleet.stop()
    fleet.start_engine(
        rows=CONVERSATIONS + ROWS_LEFT, pool_tokens=2 * CONVERSATIONS * CONTEXT_TOKENS
    )
    fleet.start_agent()
    fleet.start_router()
    try:
        yield
    finally:
        fleet.stop()
        fleet.revive()


def update(url: str, path: Path, **more: Any) -> wire.Answer:
    return wire.post(
        f"{url}/update_weights_from_disk", {"model_path": str(path), **more}, seconds=120
    )


@contextmanager
def own_weights_after(fleet: Fleet, own: Path) -> Iterator[None]:
    """Gives the engine its own weights back for the tests that follow."""
    try:
        yield
    finally:
        restored = update(fleet.router_url, own)
        assert restored.status == 200, f"the engine's own weights ({restored})"


def generate(url: str, text: str, **more: Any) -> wire.Answer:
    request = body(text, ANSWER_TOKENS, return_logprob=True, **more)
    return wire.post(f"{url}/generate", request)


def log_probabilities(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def epoch_of(answer: wire.Answer) -> int:
    return int(answer.headers["x-berth-weights"].split("/")[0])


class Conversation:
    """A pinned conversation whose turns send only new text. It begins its session again, with the
    full history, when it hears that the weights have changed."""

    def __init__(self, fleet: Fleet, number: int):
        self.fleet, self.number = fleet, number
        self.id = new_id("weights")
        self.history = f"This is conversation {number}. "
        self.session_has = 0
        self.answered: list[Answered] = []
        self.reopened = 0
        # How many turns were refused, by code.
        self.refused: dict[str, int] = {}
        open_session(fleet, session_id=self.id, retention="pinned")

    def turn(self, text: str) -> None:
        prompt = self.history + text
        while True:
            new = prompt[self.session_has :]
            answer = generate(self.fleet.router_url, new, session_params={"id": self.id})
            if answer.status == 200:
                break
            code = refusal_code(answer, answer.status, "a turn")
            # The turn that was refused may still be on its way out of the engine.
            if code in ("engine_held", "session_busy"):
                continue
            assert code in ("weights_changed", "history_unknown"), f"a turn: {answer}"
            self.refused[code] = self.refused.get(code, 0) + 1
            again = {"session_id": self.id, "retention": "pinned"}
            opened = wire.post(f"{self.fleet.router_url}/v1/sessions", again)
            assert opened.status == 200, f"the session opened again ({opened})"
            self.session_has, self.reopened = 0, self.reopened + 1
        said = answer.json()
        assert said["meta_info"]["prompt_tokens"] == len(prompt), "the whole history"
        self.history = prompt + said["text"]
        self.session_has = len(self.history)
        self.answered.append(
            Answered(epoch_of(answer), prompt, said["output_ids"], log_probabilities(said))
        )


def test_no_answer_continues_older_kv_over_three_updates(fleet: Fleet, tmp_path: Path) -> None:
    models = checkpoints(tmp_path)
    with room_for_all(fleet), own_weights_after(fleet, models[0]):
        # Each checkpoint's epochs begin here.
        begins = [epoch_of(generate(fleet.router_url, "Which weights?"))]
        conversations = [Conversation(fleet, number) for number in range(CONVERSATIONS)]
        stop, errors = threading.Event(), []

        def talk(conversation: Conversation) -> None:
            try:
                turn = 0
                while not stop.is_set() and len(conversation.history) < 1_500:
                    conversation.turn(f" Turn {turn}, please.")
                    turn += 1
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(each,)) for each in conversations]
        for thread in threads:
            thread.start()
        for path in models[1:]:
            counts = [len(each.answered) for each in conversations]
            wait_until(
                fleet.engine, "answering each conversation",
                lambda: errors or all(
                    len(each.answered) > count or not thread.is_alive()
                    for each, count, thread in zip(conversations, counts, threads)
                ),
                SETTLE_SECONDS_MAX,
            )
            updated = update(fleet.router_url, path)
            assert updated.status == 200, f"the update ({updated})"
            begins.append(epoch_of(generate(fleet.router_url, "Which weights?")))
        stop.set()
        for thread in threads:
            thread.join(120)
        assert not errors, errors
        for each in conversations:
            # One more turn each, on the last weights.
            each.turn(" The end.")
        refused = [each.refused for each in conversations]
        print(f"    refused: {refused}", flush=True)
        assert begins == sorted(set(begins)), f"an update without an epoch: {begins}"
        assert sum(each.reopened for each in conversations) >= CONVERSATIONS, "sessions reopened"
        check_all(fleet, models, begins, [a for each in conversations for a in each.answered])
        for each in conversations:
            delete_session(fleet, each.id)


def check_all(
    fleet: Fleet, models: list[Path], begins: list[int], answered: list[Answered]
) -> None:
    """Compares each answer with a fresh run on the weights that it names."""
    worst, differs_elsewhere = 0.0, 0
    for number, path in enumerate(models):
        ends = begins[number + 1] if number + 1 < len(begins) else begins[-1] + 1_000
        mine = [each for each in answered if begins[number] <= each.epoch < ends]
        assert mine, f"no answer on checkpoint {number}"
        assert update(fleet.router_url, path).status == 200, "the weights for the check"
        for each in mine:
            fleet.flush()
            fresh = generate(fleet.engine_url, each.prompt).json()
            errors = [
                abs(said - again)
                for said, again in zip(each.log_probabilities, log_probabilities(fresh))
            ]
            # Of two tokens that are equally likely, another run may choose the other one, and goes
            # on after it.
            pairs = zip(each.output_ids, fresh["output_ids"], strict=True)
            same = next((at for at, (said, again) in enumerate(pairs) if said != again), len(errors))
            errors = errors[: same + 1]
            worst = max(worst, *errors)
            assert max(errors) < LOG_PROBABILITY_ERROR_MAX, f"log probabilities: off by {max(errors)}"
        # The check can fail: other weights give other answers.
        other = models[(number + 1) % len(models)]
        assert update(fleet.router_url, other).status == 200, "other weights"
        fleet.flush()
        differs_elsewhere += generate(fleet.engine_url, mine[0].prompt).json()["output_ids"] != (
            mine[0].output_ids
        )
    assert differs_elsewhere == len(models), "the checkpoints answer alike"
    print(f"    {len(answered)} answers, log probabilities off by at most {worst:.1e}", flush=True)


def test_stale_kv_would_show(fleet: Fleet, tmp_path: Path) -> None:
    """What the fence is for: the bare engine continues KV of older weights, and the answer is
    neither that of the old weights nor that of the new ones."""
    models = checkpoints(tmp_path)
    with own_weights_after(fleet, models[0]):
        id, text = new_id("stale"), "A long enough beginning for a difference. " * 4
        opened = {"capacity_of_str_len": 1000, "session_id": id, "streaming": True}
        assert wire.post(f"{fleet.engine_url}/open_session", opened).status == 200
        first = generate(fleet.engine_url, text, session_params={"id": id}).json()
        assert update(fleet.engine_url, models[1], flush_cache=False).status == 200
        more = " And on."
        stale = generate(fleet.engine_url, more, session_params={"id": id}).json()
        wire.post(f"{fleet.engine_url}/close_session", {"session_id": id})
        fleet.flush()
        fresh = generate(fleet.engine_url, text + first["text"] + more).json()
        errors = [a - b for a, b in zip(log_probabilities(stale), log_probabilities(fresh))]
        shows = stale["output_ids"] != fresh["output_ids"] or max(map(abs, errors)) > (
            10 * LOG_PROBABILITY_ERROR_MAX
        )
        assert shows, f"stale KV doesn't show: {errors}"


def test_a_partial_failure_is_told_for_each_worker(fleet: Fleet) -> None:
    absent = Fleet(fleet.folder, fleet.bin_dir, fleet.page_size)
    (absent.agent_control,) = free_addresses(1)
    second = Fleet(fleet.folder, fleet.bin_dir, fleet.page_size)
    second.agent_control = fleet.agent_control
    second.start_router(absent)
    try:
        flushed = wire.post(f"{second.router_url}/flush_cache", {})
        said = flushed.json()
        assert flushed.status == 502, f"the status of {flushed}"
        assert said["workers"][fleet.worker]["status"] == 200, f"the worker that is there: {said}"
        assert sorted(worker["status"] for worker in said["workers"].values()) == [200, 502]
        alone = wire.post(f"{second.router_url}/flush_cache?workers={fleet.worker}", {})
        assert alone.status == 200, f"the worker alone ({alone})"
        assert alone.body.startswith(b"Cache flushed."), "the engine's own answer"
    finally:
        second.router.stop(30)
