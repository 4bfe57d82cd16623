"""Keeps from schemathesis what the schema can't say: a session's id has a limit in bytes.

A schema counts characters. An id within that count and above the limit is refused, and schemathesis
would call this a fault. Longer ones stay: they must be refused.
"""

from typing import Any
from urllib.parse import unquote

import schemathesis

ID_SIZE_MAX = 256


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    places = [place for place in (case.path_parameters, case.body) if isinstance(place, dict)]
    texts = [text for place in places for text in place.values() if isinstance(text, str)]
    # A path's ids are percent-encoded.
    ids = [unquote(text) for text in texts]
    sizes = [(len(id), len(id.encode(errors="surrogatepass"))) for id in ids]
    return all(characters > ID_SIZE_MAX or size <= ID_SIZE_MAX for characters, size in sizes)
