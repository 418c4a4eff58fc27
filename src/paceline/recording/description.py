"""Checks the description of a recording, which may come from anywhere, before anything else reads it."""

import json
from typing import Any

# Any number beyond this is damage: the rows have numbers of 64 bits.
_LIMIT = 1 << 63
_COUNTS = ("rank", "world", "hosts", "first_cap", "cap", "wrapper", "plan", "pid")
_TEXTS = ("module", "backend", "transport", "device", "exchange", "unit", "host", "boot")


def parse_description(content: bytes) -> dict[str, Any]:
    """The description that a file has.

    Raises:
        ValueError: it is not the description of a recording. The message says why, in one line.
    """
    try:
        description = json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    if not isinstance(description, dict):
        raise ValueError("it is not an object")
    if not _is_number(description.get("version")):
        raise ValueError("it has no version")
    return description


def check_description(description: dict[str, Any]) -> None:
    """Raise ValueError unless a description of this version has all that is read later.

    Its keys are the fields of ``WrapperDescription`` and ``PlanDescription``, and those that ``PlanWriter``
    adds.
    """
    missing = [name for name in (*_COUNTS, *_TEXTS, *_OTHERS) if name not in description]
    if missing:
        raise ValueError(f"a value is missing: {missing[0]!r}")
    checks = {
        **dict.fromkeys(_COUNTS, _is_count),
        **dict.fromkeys(_TEXTS, _is_text),
        **_OTHERS,
    }
    for name, is_right in checks.items():
        if not is_right(description[name]):
            raise ValueError(f"a value has the wrong type, or is out of range: {name!r}")
    if description["rank"] not in description["group"]:
        raise ValueError("the rank is not in its own group")
    slots = len(description["slots"])
    if len(description["nbytes"]) != slots:
        raise ValueError("there are not as many sizes ('nbytes') as parameters ('slots')")
    if not description["buckets"]:
        raise ValueError("there are no buckets")
    if any(slot >= slots for bucket in description["buckets"] for slot in bucket["slots"]):
        raise ValueError(f"a bucket has a parameter that does not exist (parameters: {slots})")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of a description")


def _is_number(value: object) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_buckets(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and _is_count(each.get("nbytes")) and _are_counts(each.get("slots"))
        for each in value
    )


_OTHERS = {
    "group": _are_counts,
    "slots": _are_texts,
    "nbytes": _are_counts,
    "buckets": _are_buckets,
    "epoch": _is_number,
}
