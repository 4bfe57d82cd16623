"""A preprocessor of mdBook: names files outside the book by their paths.

On a git host, a link such as `../config/keys.toml` opens the file. The book may be served where
there is no checkout, so there the link becomes the file's path in the source. With
BERTH_SOURCE_URL, an address such as `https://git.example/berth/blob/main`, it stays a link.
"""

import json
import os
import re
import sys
from pathlib import Path

# A text in brackets, and a target that leaves the folder of the pages.
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
FOLDER = Path("deploy/docs")


def rewrite(text: str, source_url: str) -> str:
    """Returns a page's text, with its links to files outside the book rewritten."""
    def replacement(link: re.Match[str]) -> str:
        path = os.path.normpath(FOLDER / link[2])
        if source_url:
            return f"[{link[1]}]({source_url.rstrip('/')}/{path}{link[3] or ''})"
        words = link[1].strip("`")
        return f"`{path}`" if words in path else f"{link[1]} (`{path}`)"
    return LINK.sub(replacement, text)


def rewrite_all(item: object, source_url: str) -> None:
    """Rewrites every chapter below an item of mdBook's book."""
    if isinstance(item, list):
        for each in item:
            rewrite_all(each, source_url)
    elif isinstance(item, dict):
        for key, value in item.items():
            if key == "content" and isinstance(value, str):
                item[key] = rewrite(value, source_url)
            else:
                rewrite_all(value, source_url)


def main() -> None:
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    rewrite_all(book, os.environ.get("BERTH_SOURCE_URL", ""))
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
