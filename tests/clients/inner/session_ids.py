"""Drops the requests whose session id the schema allows and the router refuses.

The router limits an id's bytes, and a schema can only limit its characters. An id of too many
characters stays in the test: it must be refused.
"""

from typing import Any
from urllib.parse import unquote

import schemathesis

ID_SIZE_MAX = 256


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    places = [place for place in (case.path_parameters, case.body) if isinstance(place, dict)]
    texts = [text for place in places for text in place.values() if isinstance(text, str)]
    # Texts in a path are percent-encoded.
    ids = [unquote(text) for text in texts]
    sizes = [(len(text), len(text.encode(errors="surrogatepass"))) for text in ids]
    return all(characters > ID_SIZE_MAX or size <= ID_SIZE_MAX for characters, size in sizes)
