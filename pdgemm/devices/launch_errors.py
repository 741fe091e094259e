"""Lack of memory on a GPU, which each library of CUDA reports by an exception and a status of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from cupy.cuda import driver, runtime

from pdgemm.errors import OutOfMemoryError

_CUDA: dict[type[Exception], int] = {runtime.CUDARuntimeError: 2, driver.CUDADriverError: 2}


def memory_errors(statuses: Mapping[type[Exception], int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that raises OutOfMemoryError where CUDA or a library lacks memory for its own work.

    statuses : the exception of each library, and the status by which the library reports this.
    """
    known = _CUDA | dict(statuses)

    def decorated(launch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(launch)
        def launched(*args: Any) -> Any:
            try:
                return launch(*args)
            except tuple(known) as error:
                if getattr(error, "status", None) == known[type(error)]:
                    free, total = runtime.memGetInfo()
                    text = f"a launch lacks memory on the GPU, of which {free} of {total} bytes are free: {error}"
                    raise OutOfMemoryError(text) from None
                raise

        return launched

    return decorated
