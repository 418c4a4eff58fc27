"""The parameter groups of an optimizer."""

from typing import Any


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, such as its learning rate, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
