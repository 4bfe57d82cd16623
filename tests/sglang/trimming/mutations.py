"""Removes each rule of trimming and of publishing the tree in turn; the tests must notice each.

    python -m trimming.mutations      from tests/sglang, with hypothesis installed
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SHIM = HERE.parents[1] / "worker-agent/shim"

# Failing examples needn't be shrunk.
RUN = """
import sys, unittest
from hypothesis import Phase, settings
settings.register_profile("found", phases=[Phase.generate])
settings.load_profile("found")
suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
raise SystemExit(not unittest.TextTestRunner(failfast=True).run(suite).wasSuccessful())
"""
TRIMMING = ["trimming.test_trimmer", "trimming.test_questions", "trimming.test_trim"]
REPUBLISHING = ["trimming.test_republish"]
# For each rule: its name, the file, the text of the rule, and the text that replaces it.
MUTATIONS = [
    (
        "an answer to another context is cut off", "trimmer",
        "right = said.get(\"prompt_tokens\") == running.turn.prompt_tokens",
        "right = True",
    ),
    (
        "a prompt that must continue its session and doesn't is refused", "trimmer",
        "if mark.must_continue and not runs_inside:",
        "if False:",
    ),
    (
        "a prompt that must continue its session takes no other", "trimmer",
        "(askable(plan) and not mark.must_continue)",
        "askable(plan)",
    ),
    (
        "what the agent answers doesn't lift the refusal", "trimmer",
        "mark = other._replace(rid=mark.rid, must_continue=mark.must_continue)",
        "mark = other._replace(rid=mark.rid)",
    ),
    (
        "an abort is without effect only if nothing was retracted", "trimmer",
        "if said.get(\"num_retractions\") == 0 else Lost()",
        "if True else Lost()",
    ),
    (
        "an abort during a question is heard again", "trimmer",
        "        state.abort_sent = False\n",
        "        pass\n",
    ),
    (
        "an end that nobody waited for is committed", "trimmer",
        "        if state.finished:\n",
        "        if False:\n",
    ),
    (
        "a turn that never left is over", "trimmer",
        "elif not state.dispatched and",
        "elif False and",
    ),
    (
        "who resends the prompt's ids resends all", "trimmer",
        "if asked.return_prompt_token_ids:",
        "if False:",
    ),
    (
        "media and the like don't fit", "eligibility",
        "if getattr(tokenized, field, None):",
        "if False:",
    ),
    (
        "the prompt's log probabilities don't fit", "eligibility",
        "if tokenized.return_logprob and",
        "if False and",
    ),
    (
        "the prompt begins with what was said", "trim",
        "prompt[:at] == said",
        "True",
    ),
    (
        "something must follow", "trim",
        "if len(prompt) > at and",
        "if len(prompt) >= at and",
    ),
    (
        "something must follow drift", "trim",
        "if j >= len(prompt):\n        return None",
        "pass",
    ),
    (
        "equal text, id for id", "trim",
        "part is None or list(prompt[j : j + len(part)]) != part",
        "part is None",
    ),
    (
        "a special token is itself", "trim",
        "or prompt[j] != said[end]",
        "",
    ),
    (
        "a replacement character proves nothing", "trim",
        "if \"\\ufffd\" in decoded",
        "if False",
    ),
    (
        "the cut is safe", "trim",
        "or _encoded(rest, text) != list(rest)",
        "",
    ),
    (
        "drift is healed from a special token on", "trim",
        "while at >= first and at > 0 and said[at - 1] not in text.specials",
        "while False",
    ),
    (
        "what drifted long ago is another history", "trim",
        "if at < first:",
        "if False:",
    ),
    (
        "one turn at a time", "trim",
        "if self.turn is not None:\n            return Nothing",
        "if 0:\n            return Nothing",
    ),
    (
        "one adapter, one salt", "trim",
        "if self._committed and tie != self._tie:",
        "if False:",
    ),
    (
        "a finished turn's answer is committed", "trim",
        "self._said.extend(outcome.answer)",
        "pass",
    ),
    (
        "a finished turn's prompt is committed", "trim",
        "self._said = turn.prompt\n",
        "pass\n",
    ),
    (
        "the engine's count, not the prompt's", "trim",
        "self._committed = turn.prompt_tokens + len(outcome.answer)",
        "self._committed = len(self._said)",
    ),
    (
        "an aborted turn isn't committed", "trim",
        "if isinstance(outcome, Finished):",
        "if isinstance(outcome, RolledBack):\n            outcome = Finished([])\n"
        "        if isinstance(outcome, Finished):",
    ),
    (
        "a retracted and aborted turn loses all", "trim",
        "elif isinstance(outcome, Lost):",
        "elif False:",
    ),
    (
        "the end of another life means nothing", "trim",
        "if turn is not self.turn:\n            return",
        "if False:\n            return",
    ),
    (
        "the engine strips a BOS of what is sent", "trim",
        "if committed and len(rest) and rest[0] == bos:",
        "if False:",
    ),
    (
        "the engine strips a BOS of what others send", "trim",
        "if self._committed and len(ids) and ids[0] == bos:",
        "if False:",
    ),
    (
        "only a session with a context strips", "trim",
        "if self._committed and len(ids) and ids[0] == bos:",
        "if len(ids) and ids[0] == bos:",
    ),
    (
        "others' overlapping turn loses all", "trim",
        "if self._refusal(tie):\n            self.lose()",
        "if self._refusal(tie):\n            pass",
    ),
    (
        "a prompt has room, or is too long", "trim",
        "return plan if tokens <= tokens_max",
        "return plan if True",
    ),
    (
        "as many as there is room for have room", "trim",
        "return plan if tokens <= tokens_max",
        "return plan if tokens < tokens_max",
    ),
    (
        "what the engine will count must have room", "trim",
        "tokens = plan.committed + len(plan.rest)",
        "tokens = len(prompt)",
    ),
    (
        "the room that is asked for is what the engine will count", "trimmer",
        "prompt = max(prompt, plan.tokens)",
        "pass",
    ),
    (
        "of what diverged it is asked", "trim",
        "isinstance(plan, Diverged | TooLong) or",
        "isinstance(plan, TooLong) or",
    ),
    (
        "of what is too long it is asked", "trim",
        "isinstance(plan, Diverged | TooLong) or",
        "isinstance(plan, Diverged) or",
    ),
    (
        "of what another session could help it is asked", "trim",
        "isinstance(plan, Nothing) and plan.elsewhere",
        "False",
    ),
    (
        "of nothing else it is asked", "trim",
        "isinstance(plan, Nothing) and plan.elsewhere",
        "isinstance(plan, Nothing)",
    ),
    (
        "another session could help where the context isn't known", "trim",
        "the session's context isn't known\", elsewhere=True)",
        "the session's context isn't known\")",
    ),
    (
        "another session could help another adapter", "trim",
        "another adapter or salt than the session's\", elsewhere=True)",
        "another adapter or salt than the session's\")",
    ),
    (
        "another session could help where none is open", "trimmer",
        "\"no such session is open\", elsewhere=True",
        "\"no such session is open\"",
    ),
    (
        "none could help where a turn runs", "trim",
        "\"a turn of the session runs\")",
        "\"a turn of the session runs\", elsewhere=True)",
    ),
    (
        "one who asks is told all the same which plan holds", "trimmer",
        "            self._tell(_message(plan, mark, asked.rid, prompt, why))",
        "            if not why:\n"
        "                self._tell(_message(plan, mark, asked.rid, prompt, why))",
    ),
    (
        "a plan that holds says for which session", "trimmer",
        "mark = other._replace(rid=mark.rid, must_continue=mark.must_continue)\n"
        "                    plan = self._plan(manager, tokenized, mark)",
        "plan = self._plan(manager, tokenized, other)",
    ),
    (
        "a plan that holds says for which turn", "trimmer",
        "mark = other._replace(rid=mark.rid, must_continue=mark.must_continue)",
        "mark = other",
    ),
    (
        "a plan is told under the agent's name for its turn", "trimmer",
        "rid = mark.rid or rid\n",
        "rid = rid\n",
    ),
    (
        "planned anew, a prompt has the answer's room", "trimmer",
        "answer.set_result(Mark(what.tokens_max, what.session))",
        "answer.set_result(Mark(1 << 31, what.session))",
    ),
    (
        "a mark has room for a prompt", "trimmer",
        "mark = Mark(int(tokens), session) if readable",
        "mark = Mark(1 << 31, session) if readable",
    ),
    (
        "a mark that can't be read names no session", "trimmer",
        "mark = Mark(int(tokens), session) if readable else Mark(0, \"\")",
        "mark = Mark(int(tokens), session) if readable else Mark(1 << 31, tokens)",
    ),
    (
        "a mark that can't be read is no question", "trimmer",
        "if not mark.session:",
        "if False:",
    ),
    (
        "why nobody helped is said", "trimmer",
        "reasons = [getattr(plan, \"why\", \"\"), why]",
        "reasons = [getattr(plan, \"why\", \"\")]",
    ),
    (
        "what is appended is said", "trimmer",
        "sent = len(getattr(plan, \"rest\", ()))",
        "sent = 0",
    ),
    (
        "an answer to another engine means nothing", "trimmer",
        "self._number = int.from_bytes(instance[:4], \"little\") << 32",
        "self._number = 0",
    ),
    (
        "who reads again hears the rest", "trimmer",
        "if not self._flushing and self._link.connected and not self._link.ready():",
        "if False:",
    ),
    (
        "tokens are bounded", "transcripts",
        "        self._make_room()\n",
        "",
    ),
    (
        "sessions are bounded", "transcripts",
        "if len(self._all) >= self._sessions_max:",
        "if False:",
    ),
    (
        "an idle session gives way first", "transcripts",
        "for idle in (True, False)",
        "for idle in (False, True)",
    ),
    (
        "a session opened again has no context", "transcripts",
        "        self.close(id)\n        if len",
        "        if id in self._all:\n            return\n        if len",
    ),
    (
        "a long node is published by parts", "republish",
        "PART_PAGES = 64",
        "PART_PAGES = 1 << 30",
    ),
    (
        "a piece ends within a node", "republish",
        "if time.perf_counter() >= end:\n                    return False",
        "if False:\n                    return False",
    ),
    (
        "a piece ends between nodes", "republish",
        "if time.perf_counter() >= end:\n                break",
        "if False:\n                break",
    ),
    (
        "a part follows the page before it", "republish",
        "    if begin:\n",
        "    if False:\n",
    ),
    (
        "a tenant's part follows a page of his", "republish",
        "event_hash_value=event_hashes[before]",
        "event_hash_value=hashes[before]",
    ),
    (
        "a tenant's pages have names of his", "republish",
        "event_hash_value=event_hashes[begin:end] or None",
        "event_hash_value=hashes[begin:end] or None",
    ),
    (
        "what is behind a node comes after it", "republish",
        "self._nodes += node.children.values()",
        "pass",
    ),
    (
        "what was put before a node by a split comes first", "republish",
        "return way[::-1]",
        "return way[:1]",
    ),
    (
        "what is gone isn't told", "republish",
        "if parent.children.get(node.key.child_key(self._tree.page_size)) is node:",
        "if True:",
    ),
    (
        "what is left before a node that is gone comes", "republish",
        "                way.append(node)\n",
        "                way.append(node)\n            else:\n                return []\n",
    ),
    (
        "what was flushed isn't told", "republish",
        "if self._root is not self._tree.root_node:",
        "if False:",
    ),
    (
        "where a node ends nothing of it is done", "republish",
        "        self._done = 0\n        return True",
        "        return True",
    ),
    (
        "what is done of one node isn't of the next", "republish",
        "self._done -= pages",
        "pass",
    ),
    (
        "who begins again has done nothing", "republish",
        "self._published, self._done = self._tree.root_node, set(), 0",
        "self._published = self._tree.root_node, set()",
    ),
    (
        "who begins again has published nothing", "republish",
        "self._root, self._published, self._done = self._tree.root_node, set(), 0",
        "self._root, self._done = self._tree.root_node, 0",
    ),
    (
        "what is on the host alone isn't on the device", "republish",
        "if not node.evicted:",
        "if True:",
    ),
    (
        "what is on the host is told", "republish",
        "if node.backuped:",
        "if False:",
    ),
]


def unnoticed(file: str, old: str, new: str) -> bool:
    """Returns whether the tests pass without the rule."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "berth_shim"
        shutil.copytree(SHIM / "berth_shim", shim)
        path = shim / f"{file}.py"
        text = path.read_text()
        assert text.count(old) == 1, f"{text.count(old)} times in {file}.py: {old}"
        path.write_text(text.replace(old, new))
        env = os.environ | {"PYTHONPATH": f"{folder}:{HERE}"}
        modules = REPUBLISHING if file == "republish" else TRIMMING
        command = [sys.executable, "-B", "-c", RUN, *modules]
        run = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True)
        return run.returncode == 0


def main() -> int:
    left = 0
    for rule, file, old, new in MUTATIONS:
        passed = unnoticed(file, old, new)
        left += passed
        print(f"{'NOT NOTICED' if passed else 'noticed':12} {rule}", flush=True)
    print(f"{len(MUTATIONS) - left} of {len(MUTATIONS)} noticed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
