"""Which reward judges which prompt, by the prompt's metadata.

A route is a mapping ``{key: condition}``, all of whose conditions must hold. A condition is a list of values, one of which
the metadata has under that key, or ``"present"`` or ``"absent"``, for the key itself. A reward without a route judges every
prompt. So a GenEval prompt (it has a ``tag``) goes to the detector and one that quotes a text to the OCR::

    routes:
      geneval: {tag: present}
      ocr: {tag: absent, text: present}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

Condition = list[Any] | Literal["present", "absent"]
Route = dict[str, Condition]


def matches(route: Mapping[str, Condition], metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt with this metadata takes this route."""
    return all(_holds(condition, key, metadata) for key, condition in route.items())


def check_routes(routes: Mapping[str, Any], rewards: Collection[str]) -> dict[str, Route]:
    """The routes by reward. Errors: ``ValueError`` on a route of no reward or without a condition, or on a condition that
    could never hold."""
    unknown = sorted(routes.keys() - set(rewards))
    if unknown:
        raise ValueError(f"routes of {unknown}: there is no such reward among {sorted(rewards)}")
    for name, route in routes.items():
        if not isinstance(route, Mapping) or not route:
            raise ValueError(
                f"the route of {name!r} is {route!r}: give a mapping such as {{tag: [colors]}} or {{tag: present}}, or leave "
                "the reward out to have it judge every prompt"
            )
        for key, condition in route.items():
            if condition not in ("present", "absent") and (not isinstance(condition, list) or not condition):
                raise ValueError(
                    f"the route of {name!r} asks for {key}: {condition!r}; give a list of values, or 'present' or 'absent'"
                )
    return {name: dict(route) for name, route in routes.items()}


def unserved(metadata: Sequence[Mapping[str, Any]], routes: Collection[Mapping[str, Condition] | None]) -> list[int]:
    """Positions of the prompts that take none of these routes (``None``: every prompt does)."""
    if None in routes:
        return []
    return [k for k, row in enumerate(metadata) if not any(matches(route or {}, row) for route in routes)]


def _holds(condition: Condition, key: str, metadata: Mapping[str, Any]) -> bool:
    if isinstance(condition, str):
        return (key in metadata) == (condition == "present")
    return key in metadata and metadata[key] in condition
