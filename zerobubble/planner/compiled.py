"""The decorator of compiled loops."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile with numba at the first call, kept on disk; threads run it side by side."""
    theirs = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _folder()
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = theirs


@cache
def _folder() -> str:
    """Where machine code is kept: one folder per state of the planner's sources.

    numba looks for changes only in the file of a function, not in those of what it calls.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return str(root / "zerobubble" / sources.hexdigest()[:16])
