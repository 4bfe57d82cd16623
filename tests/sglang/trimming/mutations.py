"""Removes each rule of trimming, of publishing the tree and of the seams in turn; the tests must
notice each.

    python -m trimming.mutations      from tests/sglang, with requirements-tests.txt installed
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SHIM = HERE.parents[1] / "worker-agent/shim"

SEAMS = ["trimming/test_seams.py"]
LINK = ["trimming/test_link.py"]
TRIMMING = [f"trimming/test_{name}.py" for name in ("trimmer", "questions", "trim", "seams")]
PREFETCHING = ["trimming/test_prefetch.py"]
REPUBLISHING = ["trimming/test_republish.py", *SEAMS]
OPTIONS = ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile=mutations", "--exitfirst"]
# For each rule: its name, the file, the text of the rule, and the text that replaces it.
MUTATIONS = [
    (
        "an answer computed on another context is broken off", "trimmer",
        "is_right_count = meta_info.get(\"prompt_tokens\") == running_turn.turn.prompt_tokens",
        "is_right_count = True",
    ),
    (
        "a prompt that must continue its session, but doesn't, is refused", "trimmer",
        "if mark.must_continue and not runs_in_session:",
        "if False:",
    ),
    (
        "a turn whose session was closed meanwhile runs without its tag", "trimmer",
        "elif tokenized.session_id not in self._transcripts:",
        "elif False:",
    ),
    (
        "nothing is appended to KV of another adapter, extra key or salt", "trimmer",
        "        if has_other_kv:\n",
        "        if False:\n",
    ),
    (
        "a prompt that must continue its session runs in no other", "trimmer",
        "(is_improvable(plan) and not mark.must_continue)",
        "is_improvable(plan)",
    ),
    (
        "the agent's answer doesn't lift the obligation to continue the session", "trimmer",
        "mark = agent_mark._replace(rid=mark.rid, must_continue=mark.must_continue)",
        "mark = agent_mark._replace(rid=mark.rid)",
    ),
    (
        "an abort changes nothing only if the turn was not retracted before", "trimmer",
        "if meta_info.get(\"num_retractions\") == 0 else Lost()",
        "if True else Lost()",
    ),
    (
        "an abort during a question can be repeated", "trimmer",
        "        state.abort_sent = False\n",
        "        pass\n",
    ),
    (
        "a turn whose client has disconnected is committed", "trimmer",
        "        if state.finished:\n",
        "        if False:\n",
    ),
    (
        "a turn that never reached the scheduler has ended", "trimmer",
        "elif not state.dispatched and",
        "elif False and",
    ),
    (
        "a client that wants the prompt's ids gets all of them", "trimmer",
        "if body.return_prompt_token_ids:",
        "if False:",
    ),
    (
        "a request with media is not trimmed", "eligibility",
        "if getattr(tokenized, field, None):",
        "if False:",
    ),
    (
        "a request for the prompt's log probabilities is not trimmed", "eligibility",
        "if tokenized.return_logprob and",
        "if False and",
    ),
    (
        "the prompt starts with the transcript's ids", "trim",
        "prompt[:shared_tokens] == ids",
        "True",
    ),
    (
        "new tokens must follow the transcript", "trim",
        "if len(prompt) > shared_tokens and",
        "if len(prompt) >= shared_tokens and",
    ),
    (
        "new tokens must follow a retokenized transcript", "trim",
        "if cut >= len(prompt):\n        return None",
        "pass",
    ),
    (
        "text is equal only if it encodes to the prompt's ids", "trim",
        "reencoded_ids is None or list(prompt[cut : cut + len(reencoded_ids)]) != reencoded_ids",
        "reencoded_ids is None",
    ),
    (
        "a special token equals only itself", "trim",
        "or prompt[cut] != ids[end]",
        "",
    ),
    (
        "a replacement character proves no equal text", "trim",
        "if \"\\ufffd\" in decoded",
        "if False",
    ),
    (
        "equal ids of a tokenizer that folds texts prove no equal text", "trim",
        "if not _have_equal_pieces(ids[begin:end], reencoded_ids, tokenizer):",
        "if False:",
    ),
    (
        "one turn of an HTTP request takes its mark", "trimmer",
        "if mark.is_taken:",
        "if False:",
    ),
    (
        "the texts on both sides of the cut encode independently", "trim",
        "return cut if _reencode(ids_after_cut, tokenizer) == list(ids_after_cut) else None",
        "return cut",
    ),
    (
        "text is compared from a special token on", "trim",
        "while start >= earliest_start and start > 0 and ids[start - 1] not in tokenizer.split_ids",
        "while False",
    ),
    (
        "a long difference is another history", "trim",
        "if start < earliest_start:",
        "if False:",
    ),
    (
        "a session runs one turn at a time", "trim",
        "if self.turn is not None:\n            return Refused",
        "if 0:\n            return Refused",
    ),
    (
        "a session has one adapter and one salt", "trim",
        "if self.has_other_kv(cache_namespace):",
        "if False:",
    ),
    (
        "a finished turn's answer is committed", "trim",
        "self._ids.extend(outcome.answer)",
        "pass",
    ),
    (
        "a finished turn's prompt is committed", "trim",
        "self._ids = turn.prompt\n",
        "pass\n",
    ),
    (
        "the committed length is the engine's, not the prompt's", "trim",
        "self._committed_tokens = turn.prompt_tokens + len(outcome.answer)",
        "self._committed_tokens = len(self._ids)",
    ),
    (
        "an aborted turn isn't committed", "trim",
        "if isinstance(outcome, Finished):",
        "if isinstance(outcome, RolledBack):\n            outcome = Finished([])\n"
        "        if isinstance(outcome, Finished):",
    ),
    (
        "a turn aborted after a retraction makes the context unknown", "trim",
        "elif isinstance(outcome, Lost):",
        "elif False:",
    ),
    (
        "the end of a turn from before a reopening is ignored", "trim",
        "if turn is not self.turn:\n            return",
        "if False:\n            return",
    ),
    (
        "the engine removes a BOS token from what is appended", "trim",
        "if committed_tokens and len(new_ids) and new_ids[0] == bos_id:",
        "if False:",
    ),
    (
        "the engine removes a BOS token from what other clients append", "trim",
        "if self._committed_tokens and len(ids) and ids[0] == bos_id:",
        "if False:",
    ),
    (
        "the engine removes a BOS token only if the session has a context", "trim",
        "if self._committed_tokens and len(ids) and ids[0] == bos_id:",
        "if len(ids) and ids[0] == bos_id:",
    ),
    (
        "an overlapping turn of another client makes the context unknown", "trim",
        "if self._refusal(cache_namespace):\n            self.discard_context()",
        "if self._refusal(cache_namespace):\n            pass",
    ),
    (
        "a prompt longer than its room is refused", "trim",
        "if prompt_tokens <= tokens_max:",
        "if True:",
    ),
    (
        "a prompt exactly as long as its room is accepted", "trim",
        "if prompt_tokens <= tokens_max:",
        "if prompt_tokens < tokens_max:",
    ),
    (
        "the room must hold what the engine will count", "trim",
        "prompt_tokens = plan.committed_tokens + len(plan.new_ids)",
        "prompt_tokens = len(prompt)",
    ),
    (
        "a question asks for the room that the engine will need", "trimmer",
        "prompt_tokens = max(prompt_tokens, plan.prompt_tokens)",
        "pass",
    ),
    (
        "the agent is asked about a diverged prompt", "trim",
        "isinstance(plan, Diverged | TooLong)",
        "isinstance(plan, TooLong)",
    ),
    (
        "the agent is asked about a prompt that is too long", "trim",
        "isinstance(plan, Diverged | TooLong)",
        "isinstance(plan, Diverged)",
    ),
    (
        "the agent is asked if another session could run the turn", "trim",
        "return plan.can_run_elsewhere",
        "return False",
    ),
    (
        "the agent is asked about no other refusal", "trim",
        "return plan.can_run_elsewhere",
        "return True",
    ),
    (
        "another session could run a turn whose context is unknown", "trim",
        "the session's context isn't known\", can_run_elsewhere=True)",
        "the session's context isn't known\")",
    ),
    (
        "another session could run a turn with another adapter", "trim",
        "another adapter or salt than the session's\", can_run_elsewhere=True)",
        "another adapter or salt than the session's\")",
    ),
    (
        "another session could run a turn whose session is not open", "trimmer",
        "\"no such session is open\", can_run_elsewhere=True",
        "\"no such session is open\"",
    ),
    (
        "no other session gets a turn whose session runs one", "trim",
        "\"a turn of the session runs\")",
        "\"a turn of the session runs\", can_run_elsewhere=True)",
    ),
    (
        "the final plan is sent after a question, too", "trimmer",
        "            self._send_plan(_plan_message(plan, mark, body.rid, prompt_tokens, why))",
        "            if not why:\n"
        "                self._send_plan(_plan_message(plan, mark, body.rid, prompt_tokens, why))",
    ),
    (
        "a final plan names its session", "trimmer",
        "mark = agent_mark._replace(rid=mark.rid, must_continue=mark.must_continue)\n"
        "                    plan = self._make_plan(manager, tokenized, mark)",
        "plan = self._make_plan(manager, tokenized, agent_mark)",
    ),
    (
        "a final plan names its turn", "trimmer",
        "mark = agent_mark._replace(rid=mark.rid, must_continue=mark.must_continue)",
        "mark = agent_mark",
    ),
    (
        "a plan carries the agent's id of the turn", "trimmer",
        "rid=mark.rid or rid,\n",
        "rid=rid,\n",
    ),
    (
        "after an answer, a prompt has the answer's room", "trimmer",
        "answer.set_result(Mark(command.tokens_max,",
        "answer.set_result(Mark(1 << 31,",
    ),
    (
        "a prompt has the room that its mark says", "trimmer",
        "mark = Mark(int(tokens), session) if is_readable",
        "mark = Mark(1 << 31, session) if is_readable",
    ),
    (
        "an unreadable mark names no session", "trimmer",
        "mark = Mark(int(tokens), session) if is_readable else Mark(0, \"\")",
        "mark = Mark(int(tokens), session) if is_readable else Mark(1 << 31, tokens)",
    ),
    (
        "an unreadable mark is refused without a question", "trimmer",
        "if not mark.session:",
        "if False:",
    ),
    (
        "a plan says why a question didn't help", "trimmer",
        "reasons = [getattr(plan, \"why\", \"\"), why]",
        "reasons = [getattr(plan, \"why\", \"\")]",
    ),
    (
        "a plan says how many tokens are appended", "trimmer",
        "appended_tokens=len(getattr(plan, \"new_ids\", ())),",
        "appended_tokens=0,",
    ),
    (
        "an answer to another engine process is ignored", "trimmer",
        "self._last_question = int.from_bytes(instance[:4], \"little\") << 32",
        "self._last_question = 0",
    ),
    (
        "an agent that reads again gets the waiting plans", "trimmer",
        "if not self._is_flush_scheduled and self._link.is_connected and not self._link.flush():",
        "if False:",
    ),
    (
        "the tokens of all transcripts are bounded", "transcripts",
        "        self._make_room()\n",
        "",
    ),
    (
        "the number of transcripts is bounded", "transcripts",
        "if len(self._by_id) >= self._sessions_max:",
        "if False:",
    ),
    (
        "idle sessions are forgotten first", "transcripts",
        "for is_idle_pass in (True, False)",
        "for is_idle_pass in (False, True)",
    ),
    (
        "a reopened session has no context", "transcripts",
        "        self.close(id)\n        if len",
        "        if id in self._by_id:\n            return\n        if len",
    ),
    (
        "a long node is published in parts", "republish",
        "PART_PAGES_MAX = 64",
        "PART_PAGES_MAX = 1 << 30",
    ),
    (
        "a chunk may end inside a node", "republish",
        "if time.perf_counter() >= deadline:\n                    return False",
        "if False:\n                    return False",
    ),
    (
        "a chunk may end between nodes", "republish",
        "if time.perf_counter() >= deadline:\n                break",
        "if False:\n                break",
    ),
    (
        "a part names the page before it as its parent", "republish",
        "    if begin:\n",
        "    if False:\n",
    ),
    (
        "a salted part names a salted parent page", "republish",
        "event_hash_value=event_hashes[page_before]",
        "event_hash_value=hashes[page_before]",
    ),
    (
        "salted pages keep their salted hashes", "republish",
        "event_hash_value=event_hashes[begin:end] or None",
        "event_hash_value=hashes[begin:end] or None",
    ),
    (
        "children are published after their node", "republish",
        "self._pending_nodes += node.children.values()",
        "pass",
    ),
    (
        "a node inserted by a split is published first", "republish",
        "return path[::-1]",
        "return path[:1]",
    ),
    (
        "removed nodes are not published", "republish",
        "if parent.children.get(node.key.child_key(self._tree.page_size)) is node:",
        "if True:",
    ),
    (
        "the remaining ancestors of a removed node are published", "republish",
        "                path.append(node)\n",
        "                path.append(node)\n            else:\n                return []\n",
    ),
    (
        "flushed nodes are not published", "republish",
        "if self._root is not self._tree.root_node:",
        "if False:",
    ),
    (
        "the page count is reset at the end of a path", "republish",
        "        self._pages_done = 0\n        return True",
        "        return True",
    ),
    (
        "one node's pages don't count for the next node", "republish",
        "self._pages_done -= pages",
        "pass",
    ),
    (
        "a restart resets the page count", "republish",
        "self._published_ids, self._pages_done = self._tree.root_node, set(), 0",
        "self._published_ids = self._tree.root_node, set()",
    ),
    (
        "a restart forgets the published nodes", "republish",
        "self._root, self._published_ids, self._pages_done = self._tree.root_node, set(), 0",
        "self._root, self._pages_done = self._tree.root_node, 0",
    ),
    (
        "a node only in host memory is not published as on the device", "republish",
        "if not node.evicted:",
        "if True:",
    ),
    (
        "a node in host memory is published as there", "republish",
        "if node.backuped:",
        "if False:",
    ),
    (
        "a hook needs its parameters in their order", "probe",
        "has_all = parameters.positional[: len(in_order)] == in_order and has_named",
        "has_all = has_named",
    ),
    (
        "a call needs the parameters that it names", "probe",
        "== in_order and has_named",
        "== in_order",
    ),
    (
        "a call passes all required parameters", "probe",
        "if has_all and not (seam.kind is Kind.CALL and asks_more):",
        "if has_all:",
    ),
    (
        "a hook takes parameters that it doesn't know", "probe",
        "if has_all and not (seam.kind is Kind.CALL and asks_more):",
        "if has_all and not asks_more:",
    ),
    (
        "without reports, nothing else works in a scheduler", "probe",
        "if \"reports\" in missing and function != \"trimming\":",
        "if False:",
    ),
    (
        "fields that a method assigns count", "probe",
        "names |= self._sources.members(base.__module__, base.__qualname__) or frozenset()",
        "pass",
    ),
    (
        "inherited fields count in sources", "probe",
        "names |= self.fields(*origin, wanted) or set()",
        "pass",
    ),
    (
        "a scheduler that can't be reported is not hooked", "__init__",
        "        if \"reports\" in self._off:\n            return\n",
        "",
    ),
    (
        "an engine without the seams of trimming is not hooked", "trimmer",
        "        if off_reason:\n            return\n",
        "",
    ),
    (
        "the hello says why demotion is off", "__init__",
        "undemotable_reason=self._off.get(\"demotion\"),",
        "",
    ),
    (
        "nothing is audited without the seams of an audit", "audit",
        "if refusal := self.refusal or snapshot",
        "if refusal := snapshot",
    ),
    (
        "the tree isn't published without the seams for it", "republish",
        "self.refusal = off_reason or _publishing_refusal",
        "self.refusal = _publishing_refusal",
    ),
    (
        "a failed probe switches all off", "__init__",
        "off = dict.fromkeys(functions, _error_reason(\"probe\", error))",
        "off = {}",
    ),
    (
        "a load gives way to prompts that wait", "prefetch",
        "            scheduler.waiting_queue\n            # It",
        "            False\n            # It",
    ),
    (
        "nothing is loaded while the engine is paused", "prefetch",
        "            or scheduler._engine_paused\n",
        "",
    ),
    (
        "a prefetch counts as a use of the KV", "prefetch",
        "        return self._matched_node(_tokens_to(leaf), leaf.key)\n", "        return leaf\n",
    ),
    (
        "what is on the device is not looked up", "prefetch",
        "        if leaf is None or not leaf.evicted:\n", "        if leaf is None:\n",
    ),
    (
        "no core without nodes is asked for them", "prefetch",
        "            getattr(tree.tree_core, \"kv_events\", None), \"record_store\"\n",
        "            tree, \"__class__\"\n",
    ),
    (
        "a load gives way to a full batch", "prefetch",
        "            or scheduler.req_to_token_pool.available_size() == 0\n",
        "",
    ),
    (
        "running turns keep room while a load lasts", "prefetch",
        " - growing * GROWTH_TOKENS_MAX",
        "",
    ),
    (
        "no load is longer than it may be", "prefetch",
        "        if tokens > tokens_max:\n",
        "        if False:\n",
    ),
    (
        "what is computed next waits for a load", "prefetch",
        "        self._scheduler.forward_stream.wait_event(finished)\n",
        "",
    ),
    (
        "a hello that changed while it was sent is sent again", "link",
        "if sent_hello is not self._hello:",
        "if False:",
    ),
]


def tests_pass_without(rule: str, file: str, old: str, new: str) -> bool:
    """Returns whether the tests pass without the rule."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "berth_shim"
        shutil.copytree(SHIM / "berth_shim", shim)
        path = shim / f"{file}.py"
        text = path.read_text()
        assert text.count(old) == 1, f"{text.count(old)} times in {file}.py: {old}"
        path.write_text(text.replace(old, new))
        env = os.environ | {"PYTHONPATH": folder}
        of_seams = dict.fromkeys(("probe", "__init__", "audit"), SEAMS)
        own = {"republish": REPUBLISHING, "link": LINK, "prefetch": PREFETCHING}
        files = (of_seams | own).get(file, TRIMMING)
        command = [sys.executable, "-B", "-m", "pytest", *OPTIONS, *files]
        run = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True)
        assert run.returncode in (0, 1), f"{rule}: no test ran\n{run.stdout}\n{run.stderr}"
        return run.returncode == 0


def main() -> int:
    unnoticed = 0
    for rule, file, old, new in MUTATIONS:
        is_unnoticed = tests_pass_without(rule, file, old, new)
        unnoticed += is_unnoticed
        print(f"{'NOT NOTICED' if is_unnoticed else 'noticed':12} {rule}", flush=True)
    print(f"{len(MUTATIONS) - unnoticed} of {len(MUTATIONS)} noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
