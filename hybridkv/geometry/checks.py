"""Checks of what callers hand in, and the grammar of the refusals. Returns the checked value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from hybridkv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import StrEnum

E = TypeVar("E", bound="StrEnum")


def refuse(name: str, expected: str, actual: object, hint: str = "") -> NoReturn:
    """Raise in the house's grammar."""
    raise UsageError(f"{name} must be {expected}, got {actual!r}" + (f"; {hint}" if hint else ""))


def size(name: str, value: object, *, least: int = 1, hint: str = "") -> int:
    """Check an integer of at least `least`; bool is refused, because True would pass for one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        refuse(name, expected, value, hint)
    return value


def sizes(name: str, value: object, *, expected: str, count: int | None = None) -> tuple[int, ...]:
    """Check a tuple of positive integers, of `count` entries where that is fixed."""
    if not isinstance(value, tuple):
        refuse(name, expected, value)
    entries = cast("tuple[object, ...]", value)
    if count is not None and len(entries) != count:
        refuse(name, expected, entries)
    return tuple(size(f"{name} entry", entry) for entry in entries)


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """Check a word against the ones that exist."""
    words = tuple(choices)
    if not isinstance(value, str) or value not in words:
        refuse(name, f"one of {', '.join(words)}", value)
    return value


def resolve(kind: type[E], name: str, value: object) -> E:
    """Turn a word into a member of a str enum."""
    return kind(one_of(name, value, [member.value for member in kind]))


def at_most(name: str, value: int, limit: int, what: str) -> int:
    """Check a part against its whole."""
    if value > limit:
        refuse(name, f"at most {what} ({limit})", value)
    return value
