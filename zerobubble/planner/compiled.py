"""The decorator of compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile with numba at the first call, kept on disk; threads run it side by side."""
    return cast(Function, njit(cache=True, nogil=True)(function))
