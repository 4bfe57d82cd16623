"""Does the documentation hold: are its links whole, is it a book, do its commands run?

A page says above each block of commands who runs it, or why nobody does. The blocks that name this
file are run here, against simulated engines, with ports of this machine in place of the usual ones.
"""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from integration.processes import Process, answers_200, free_ports, wait_until

from deploy.pages import DOCS, Block, anchors, blocks, links, pages
from deploy.programs import ROOT, run

START_SECONDS_MAX = 60
BLOCK_SECONDS_MAX = 120
HERE = "tests/deploy/docs.py"
AS_SERVERS = "as servers"
# The exit statuses that a block may have, by what its mark says.
STATUSES = {None: {0}, "exit status 0 or 1": {0, 1}}
# The usual ports: the engine's, the agent's and the router's.
PORTS = (30000, 31000, 31001, 31002, 8080, 8081)


def run_here(servers: bool) -> list[Block]:
    """Returns the blocks that this file runs: those that start servers, or the others."""
    own = [block for block in blocks() if block.mark and block.mark["by"] == HERE]
    return [block for block in own if (block.mark["how"] == AS_SERVERS) == servers]


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in pages():
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert not broken, "\n".join(broken)


def test_the_book_has_every_page_once() -> None:
    assert sorted(links(DOCS / "SUMMARY.md")) == sorted(
        page.name for page in DOCS.glob("*.md") if page.name != "SUMMARY.md")


class Page(HTMLParser):
    """The links and the ids of a page of the book."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids.add(named.get("id") or "")
        self.links += [value for key in ("href", "src") if (value := named.get(key))]


def test_the_book_is_built_and_its_links_are_whole(
    find_tool: Callable[[str], str], tmp_path: Path
) -> None:
    made = run(find_tool("mdbook"), "build", "--dest-dir", tmp_path, DOCS)
    log = made.stdout + made.stderr
    assert made.returncode == 0 and "WARN" not in log and "ERROR" not in log, log
    read: dict[Path, Page] = {}
    for path in tmp_path.rglob("*.html"):
        read[path] = Page()
        read[path].feed(path.read_text())
    assert tmp_path / "index.html" in read and len(read) > 30
    broken = []
    for path, page in read.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link) or path.name in ("404.html", "toc.html"):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            known = read.get(target)
            if not target.exists() or (known and anchor and anchor not in known.ids):
                broken.append(f"{path.name}: {link}")
    assert not broken, "\n".join(broken)


def test_the_sizes_are_what_the_formulas_give() -> None:
    rows = [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
            for line in (DOCS / "sizing.md").read_text().splitlines() if line.startswith("| ")]
    models = [row for row in rows if len(row) == 6 and row[1].isdigit()]
    assert len(models) > 5
    for model, layers, heads, size, token_bytes, tokens in models:
        if heads == "MLA":
            numbers = sum(map(int, size.split(" + ")))
        else:
            numbers = 2 * int(heads) * int(size)
        assert int(token_bytes) == int(layers) * numbers * 2, model
        assert int(tokens) == (10 << 30) // int(token_bytes), model
    pools = [row for row in rows if len(row) == 5 and all(cell.isdigit() for cell in row)]
    assert len(pools) > 3
    for pool, budget, by_kv, by_rows, pinned in (map(int, row) for row in pools):
        assert (budget, by_kv) == (pool * 7 // 10, pool * 7 // 10 // 100_000)
        assert by_rows == min(64 // 2, 64 - 1) and pinned == min(by_kv, by_rows)


def test_every_block_says_who_runs_it_or_why_nobody_does() -> None:
    wrong = []
    for block in blocks():
        if block.mark is None:
            wrong.append(f"{block}: write `<!-- run by FILE -->` or `<!-- not run: WHY -->` above")
        elif (file := block.mark["by"]) and not (ROOT / file).exists():
            wrong.append(f"{block}: there is no {file}")
        elif file == HERE and block.mark["how"] not in (*STATUSES, AS_SERVERS):
            wrong.append(f"{block}: {HERE} doesn't know how to run it: {block.mark['how']}")
    assert not wrong, "\n".join(wrong)


class Servers:
    """Servers that a page tells its readers to start, on ports of this machine."""

    def __init__(self, folder: Path, bin_dir: Path):
        folder.mkdir(parents=True)
        self.ports = dict(zip(PORTS, free_ports(len(PORTS))))
        self.folder, self._bin_dir = folder, bin_dir
        self._started: list[Process] = []

    def translate(self, text: str) -> str:
        """Returns commands of a page with this machine's ports and built programs."""
        text = re.sub(r"^cargo build .*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"cargo run --release --bin ([\w-]+)(?: --)?", r"\1", text)
        for usual, own in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1:|localhost:|--port ){usual}\b", rf"\g<1>{own}", text)
        return text

    def start(self, text: str) -> None:
        """Starts each command of a block. Returns when each serves."""
        for line in self.translate(text).replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line, comments=True)
            address = {port: f"127.0.0.1:{own}" for port, own in self.ports.items()}
            more, health = {
                "engine-sim": ([], f"http://{address[30000]}/health"),
                "berth-agent": (
                    ["--data-addr", address[31000], "--control-addr", address[31001],
                     "--admin-addr", address[31002]], f"http://{address[31002]}/healthz"),
                "berth-router": (
                    ["--data-addr", address[8080], "--admin-addr", address[8081]],
                    f"http://{address[8081]}/healthz"),
            }[program]
            env = {"XDG_RUNTIME_DIR": str(self.folder), "XDG_STATE_HOME": str(self.folder)}
            command = [str(self._bin_dir / program), *words, *more]
            process = Process.start(program, command, self.folder, env)
            self._started.append(process)
            wait_until(process, "serving", lambda: answers_200(health), START_SECONDS_MAX)

    def wait_until_ready(self) -> None:
        """Waits until the router, which was started last, has heard of the agent's engine."""
        ready = f"http://127.0.0.1:{self.ports[8081]}/readyz"
        wait_until(self._started[-1], "ready", lambda: answers_200(ready), START_SECONDS_MAX)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.send(signal.SIGINT)
            process.stop(START_SECONDS_MAX)

    def env(self) -> dict[str, str]:
        """Returns the environment in which commands find the servers and programs."""
        return {
            **os.environ,
            "PATH": f"{self._bin_dir}:{os.environ['PATH']}",
            "BERTH_ROUTER": f"http://127.0.0.1:{self.ports[8080]}",
            "BERTH_AGENT": f"http://127.0.0.1:{self.ports[31001]}",
        }


@pytest.fixture(scope="module")
def fleet(bin_dir: Path, folder: Path) -> Iterator[Servers]:
    """The engine, the agent and the router of the page `start`."""
    servers = Servers(folder / "docs", bin_dir)
    try:
        text, = [block.text for block in run_here(True) if block.page.name == "start.md"]
        servers.start(text)
        servers.wait_until_ready()
        yield servers
    finally:
        servers.stop()


@pytest.mark.parametrize("block", run_here(True), ids=str)
def test_servers_start_as_printed(block: Block, bin_dir: Path, tmp_path: Path) -> None:
    servers = Servers(tmp_path / "s", bin_dir)
    try:
        servers.start(block.text)
    finally:
        servers.stop()


# In commands, `curl` fails if the answer is an error, as `-f` makes it.
PRELUDE = "set -e\ncurl() { command curl --fail --silent --show-error \"$@\"; }\n"
TURN = """curl -D - localhost:8080/v1/chat/completions -H 'content-type: application/json' \
 -d '{"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}'"""


PAGES = sorted({block.page for block in run_here(False)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run_as_printed(page: Path, fleet: Servers, tmp_path: Path) -> None:
    turn = run_block(TURN, fleet, tmp_path)
    turn_id = re.search(r"^x-berth-turn: (\w+)", turn.stdout, re.MULTILINE | re.IGNORECASE)
    assert turn_id, turn.stdout + turn.stderr
    for block in run_here(False):
        if block.page != page:
            continue
        text = block.text.replace("0123456789abcdef", turn_id[1])
        if "berth-demo" in text:
            text = text.replace("--seconds 20", "--seconds 2")
        made = run_block(text, fleet, tmp_path)
        is_right = made.returncode in STATUSES[block.mark["how"]]
        assert is_right, f"{block}: {made.returncode}: {made.stdout}{made.stderr}"


def run_block(text: str, fleet: Servers, folder: Path) -> subprocess.CompletedProcess:
    """Runs commands in a folder, where those of earlier blocks have left their files."""
    return subprocess.run(
        ["bash", "-c", PRELUDE + fleet.translate(text)], cwd=folder, env=fleet.env(),
        capture_output=True, text=True, timeout=BLOCK_SECONDS_MAX,
    )


def test_every_metric_that_is_served_is_in_the_reference(fleet: Servers, tmp_path: Path) -> None:
    run_block(TURN, fleet, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")] for line in
            (DOCS / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    kinds = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert len(kinds) > 100
    for port in (31002, 8081):
        text = run_block(f"curl 127.0.0.1:{port}/metrics", fleet, tmp_path).stdout
        served = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
        assert len(served) > 30, text
        for name, kind in served:
            full_names = [name, f"{name}_total", f"{name}_info"]
            found = [kinds[full_name] for full_name in full_names if full_name in kinds]
            assert found and (kind in found or "info" in found), f"{name}: {kind}, not {found}"
