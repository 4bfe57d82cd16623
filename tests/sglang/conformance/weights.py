"""What trainers do: pauses, updates of the weights, and their answers."""

from pathlib import Path

from conformance.engine import Engine, ids
from conformance.groups import in_groups
from integration.fleet import engine_home


def own_model(engine: Engine) -> str:
    """Returns the path from which the engine has its weights; the simulator takes any."""
    return "tiny" if engine.program else str((engine_home() / "model").resolve())


@in_groups("page16")
def test_an_update_waits_until_nothing_runs_and_flushes(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    update = {"model_path": own_model(engine), "weight_version": "one"}
    with engine.slow(0.01):
        running = engine.flow(None, ids(20, 2), 60)
        running.first()
        updated = engine.post("/update_weights_from_disk", update)
        assert running.end().good().completion == 60, "tokens of what ran"
    said = updated.json()
    assert (updated.status, said["success"]) == (200, True), f"the update ({updated})"
    assert set(said) == {"success", "message", "num_paused_requests"}, "members of the answer"
    engine.until_used(0, "used after the update")
    assert engine.get("/model_info").json()["weight_version"] == "one", "the label"
    # The session keeps its history, and computes it again.
    reply = engine.turn(session, ids(3, 2), 4).good()
    assert (reply.prompt, reply.cached) == (63, 0), "prompt and cached tokens after the update"


@in_groups("page16")
def test_an_update_without_a_flush_leaves_the_kv(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(40, 1), 20).good()
    update = {"model_path": own_model(engine), "flush_cache": False}
    assert engine.post("/update_weights_from_disk", update).status == 200, "the update"
    reply = engine.turn(session, ids(3, 2), 4).good()
    assert reply.cached == 59, "cached tokens: the KV of the old weights"


@in_groups("page16")
def test_a_missing_model_changes_nothing(engine: Engine) -> None:
    before = engine.get("/model_info").json()
    failed = engine.post("/update_weights_from_disk", {"model_path": "/missing"})
    assert (failed.status, failed.json()["success"]) == (400, False), f"the update ({failed})"
    assert failed.json()["message"].startswith("Failed to get "), "how the message begins"
    assert engine.get("/model_info").json() == before, "the model"


@in_groups("page16")
def test_updates_of_tensors_need_a_begin(engine: Engine) -> None:
    outside = engine.post("/update_weights_from_tensor", {"serialized_named_tensors": []})
    assert outside.status == 400, f"an update outside ({outside})"
    assert "must run between" in outside.json()["message"], "its message"
    assert engine.post("/end_weight_update", {}).status == 400, "an end without a begin"
    for path, status in [("begin", 200), ("begin", 400), ("end", 200), ("end", 400)]:
        answer = engine.post(f"/{path}_weight_update", {})
        assert answer.status == status, f"{path} ({answer})"


@in_groups("page16")
def test_a_paused_engine_takes_requests_and_runs_none(engine: Engine) -> None:
    for mode in ("abort", "in_place"):
        paused = engine.post("/pause_generation", {"mode": mode})
        said = {"message": "Generation paused successfully.", "status": "ok"}
        assert (paused.status, paused.json()) == (200, said), f"the pause ({paused})"
        assert engine.get("/ready").status == 503, "not ready"
        waits = engine.pending(None, ids(20, 2), 3)
        flushed = engine.post("/flush_cache")
        assert flushed.status == 200, f"a flush while it is paused ({flushed})"
        assert not waits.done(), "it waits"
        goes_on = engine.post("/continue_generation", {})
        assert goes_on.status == 200, f"the end of the pause ({goes_on})"
        assert waits.end().good().completion == 3, "tokens of what waited"


@in_groups("page16")
def test_a_label_alone_can_be_set(engine: Engine) -> None:
    labelled = engine.post("/update_weight_version", {"new_version": "two"})
    assert labelled.json() == {
        "success": True, "message": "Weight version updated to two", "new_version": "two",
    }, f"the answer ({labelled})"
    assert engine.get("/model_info").json()["weight_version"] == "two", "the label"


@in_groups("page16")
def test_profiles_and_adapters_answer(engine: Engine) -> None:
    refused = engine.post("/load_lora_adapter", {"lora_name": "a", "lora_path": str(Path("a"))})
    assert (refused.status, refused.json()["success"]) == (400, False), f"no LoRA here ({refused})"
