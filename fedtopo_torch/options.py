"""Declared options: one base for everything a user can configure (algorithms, datasets, models).

An option is a class annotation with a default and, where it has one, a range::

    class FedProx(FedAvg):
        mu: float = Field(0.1, ge=0, description="pull towards the round's starting model")

Values are checked where they are declared: type, range, finite. A name that was never declared is
an error that tells the nearest one that was. Objects are frozen: a method keeps no state.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = [
    "FedtopoError",
    "OptionError",
    "Options",
    "did_you_mean",
    "names_from_text",
    "pair_from_text",
    "parse_assignments",
]


class FedtopoError(Exception):
    """Base of errors whose text is meant for people."""


class OptionError(ValueError, FedtopoError):
    """A configuration that can't be used: unknown option, wrong type or value out of range."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, and all of them when they are few."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"{hint} Known: {', '.join(known) or 'none'}."


class Options(BaseModel):
    """Base of every configurable class: a frozen set of declared, checked options.

    Raises:
        OptionError: an unknown option (with the nearest right name), a value of the wrong type,
            out of its range, NaN or infinite.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    def __init__(self, **values: Any) -> None:
        owner = type(self).__name__
        values = dict(values)
        for name, value in values.items():
            if name not in type(self).model_fields:
                raise OptionError(
                    f"{owner} has no option '{name}'." + did_you_mean(name, type(self).model_fields)
                )
            # pydantic would take True for 1.
            field = type(self).model_fields[name]
            if isinstance(value, bool) and not _takes_bool(field.annotation):
                raise OptionError(
                    f"{owner}: option {name} = {value} is not valid: must not be a bool."
                )
            default = field.get_default(call_default_factory=True)
            if value == "none" and _show(default) == "none":
                values[name] = default
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionError(_explain(owner, error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen: keep '{name}' in the dicts that hooks return, "
            f"not in the object."
        )

    @classmethod
    def option_lines(cls) -> list[tuple[str, str, str, str]]:
        """``(name, default, range, meaning)`` of every option, for help texts."""
        return [
            (
                name,
                _show(field.get_default(call_default_factory=True)),
                _range(field.annotation, field.metadata),
                field.description or "",
            )
            for name, field in cls.model_fields.items()
        ]


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS = {Path: "a path", int: "whole number", float: "number", str: "text", bool: "true or false"}


def _range(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type and its bounds in words: ``"number >= 0, <= 1"``, ``"ward, average or complete"``."""
    bounds = [
        f"{sign} {getattr(item, key):g}"
        for item in metadata
        for key, sign in _SIGNS.items()
        if getattr(item, key, None) is not None
    ]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _range(arguments[0], _constraints(arguments[1:]))
    if origin is Literal:
        words = [str(value) for value in arguments]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if origin in (Union, UnionType):
        return " or ".join(
            "none" if part is type(None) else _range(part, metadata) for part in arguments
        )
    if origin is tuple:
        inner = [part for part in arguments if part is not Ellipsis]
        return f"{_range(inner[0])}s, separated by commas" if inner else "values"
    return " ".join([_KINDS.get(annotation, str(annotation)), ", ".join(bounds)]).strip()


def _constraints(metadata: Iterable[Any]) -> list[Any]:
    """The bounds in an ``Annotated``: pydantic wraps them in a field of its own."""
    found: list[Any] = []
    for item in metadata:
        found += getattr(item, "metadata", [item])
    return found


def _takes_bool(annotation: Any) -> bool:
    return annotation is bool or any(_takes_bool(a) for a in get_args(annotation))


def _explain(owner: str, error: ValidationError) -> str:
    problems: dict[str, list[str]] = {}
    given: dict[str, Any] = {}
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "missing":
            problems.setdefault(name, []).append("given: it has no default")
            given[name] = None
            continue
        message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        problems.setdefault(name, []).append(message)
        # With several alternatives (a union) pydantic reports each: the user gave one value.
        given[name] = item["input"] if len(item["loc"]) <= 2 else given.get(name)
    lines = []
    for name, messages in problems.items():
        wanted = " or ".join(dict.fromkeys(messages))
        lines.append(
            f"{owner}: option {name} = {given[name]!r} is not valid: must be {wanted}."
            if name
            else f"{owner}: {wanted}."
        )
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def names_from_text(value: Any) -> Any:
    """``"chol, fbs"`` as a tuple of names, for options given on the command line."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def pair_from_text(value: Any) -> Any:
    """``"3,12"`` as two parts, for options given on the command line.

    Raises:
        ValueError: not two of them.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise ValueError("two numbers, separated by a comma")
    return parts


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """``["abar=0.3", "n_clusters=auto"]`` as a dict of strings; pydantic converts them later.

    Raises:
        OptionError: an entry without ``=``, or an option given twice.
    """
    values: dict[str, str] = {}
    for entry in assignments:
        name, equals, value = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise OptionError(f"'{entry}' is not NAME=VALUE, for example abar=0.3.")
        if name in values:
            raise OptionError(f"option '{name}' is given twice ({values[name]} and {value}).")
        values[name] = value.strip()
    return values
