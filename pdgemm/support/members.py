"""Members of classes: attributes that are those of a part, and methods whose results are computed once.

The results are cached in the object, which must be immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


def attribute_at(path: str) -> Any:
    """Return a property that reads the attribute at this path, such as "unfolding.dtype"; it cannot be set."""
    return property(attrgetter(path))


def remembered(method: Callable[[Value, Any], Result]) -> Callable[[Value, Any], Result]:
    """Cache the results of a method of one argument in the object, whose fields must never change."""
    return remembered_if(None)(method)


def remembered_if(
    worth: Callable[[Any], bool] | None,
) -> Callable[[Callable[[Value, Any], Result]], Callable[[Value, Any], Result]]:
    """Cache, as `remembered` does, only the results for which `worth` is true; None: all results."""

    def decorate(method: Callable[[Value, Any], Result]) -> Callable[[Value, Any], Result]:
        @wraps(method)
        def remember(value: Value, argument: Any) -> Result:
            known = value.__dict__.setdefault("_known", {})
            key = method.__name__, argument
            if key in known:
                return known[key]
            result = method(value, argument)
            if worth is None or worth(result):
                known[key] = result
            return result

        return remember

    return decorate
