"""Reads the documentation: its links, its anchors, and the commands that it shows."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deploy.programs import ROOT

DOCS = ROOT / "deploy/docs"
# What a page may say of a block of commands, in a comment above it.
MARK = re.compile(
    r"<!-- (?:run by (?P<by>[\w./-]+)(?:: (?P<how>[^>]+))?|not run: (?P<why>[^>]+)) -->"
)
SHELLS = ("sh", "bash", "console", "shell")


@dataclass
class Block:
    """A fenced block of commands. `mark` is what the page says of it; `None`: nothing."""

    page: Path
    line: int
    text: str
    mark: re.Match[str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Returns the pages whose links are checked: all that people read."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "worker-agent/shim/README.md")]
    return top + sorted((ROOT / "deploy").rglob("*.md"))


def blocks() -> list[Block]:
    """Returns all blocks of commands of the README and the guides."""
    return [block for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
            for block in read_blocks(page)]


def read_blocks(page: Path) -> list[Block]:
    found = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"( *)```(\w*)", lines[number])
        if not fence:
            number += 1
            continue
        end = next(at for at in range(number + 1, len(lines)) if lines[at] == f"{fence[1]}```")
        if fence[2] in SHELLS:
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[number + 1:end])
            mark = MARK.fullmatch(lines[number - 1].strip())
            found.append(Block(page, number + 1, text, mark))
        number = end + 1
    return found


def without_code(text: str) -> str:
    """Returns a page's text without blocks and pieces of code, where brackets are no links."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def links(page: Path) -> list[str]:
    """Returns the targets of a page's links and pictures."""
    text = without_code(page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, as git hosts and mdBook make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        same = sum(1 for anchor in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", anchor))
        found.append(f"{name}-{same}" if same else name)
    return frozenset(found)
