"""Functions made from text, such as formulas composed of parts."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any


def define(name: str, text: str, names: Mapping[str, Any]) -> Any:
    """The function ``name`` that this source text defines; ``names`` are its globals.

    ``inspect.getsource`` finds the text, from which Triton compiles. The file name depends on the text alone: it is the same
    in every process.
    """
    file = f"<subulp {name} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"__name__": __name__, **names}
    exec(compile(text, file, "exec"), space)
    return space[name]
