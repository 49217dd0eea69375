"""Typed access to a Hugging Face configuration: a refusal names the field, what it must be, what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, cast

from hybridkv.geometry.checks import one_of, refuse, size

# kind of a layer -> it holds KV, it holds recurrent or convolution state
LAYER_KINDS: Mapping[str, tuple[bool, bool]] = {
    "full_attention": (True, False),
    "attention": (True, False),
    "sliding_attention": (True, False),
    "linear_attention": (False, True),
    "mamba": (False, True),
    "conv": (False, True),
    "hybrid": (True, True),
    "mlp": (False, False),
    "moe": (False, False),
}
PATTERN_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class Fields:
    """Typed access. Null counts as absent; of several names the first that is present counts."""

    def __init__(self, values: Mapping[str, object], prefix: str = "config") -> None:
        self.values = values
        self.prefix = prefix

    def find(self, *names: str) -> tuple[str, object]:
        """Return a field under its full name, None where it is absent."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return f"{self.prefix}.{name}", value
        return f"{self.prefix}.{names[0]}", None

    def missing(self, name: str, expected: str) -> NoReturn:
        """Refuse a configuration that leaves out a field that nothing replaces."""
        refuse(f"{self.prefix}.{name}", expected, None, "the field is missing")

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Read a size; without `default` the field has to be there."""
        name, value = self.find(*names)
        if value is None and default is not None:
            return default
        return size(name, value, least=least, hint="the field is missing" if value is None else "")

    def words(self, *names: str) -> list[str] | None:
        """Read a list of words, one a layer."""
        name, value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            refuse(name, "a list with the kind of every layer", value)
        kinds = [one_of(f"{name} entry", word, LAYER_KINDS) for word in cast("list[object]", value)]
        total = self.size("num_hidden_layers", default=len(kinds))
        if not kinds or len(kinds) != total:
            refuse(name, f"a list of num_hidden_layers ({total}) kinds", f"{len(kinds)} of them")
        return kinds

    def indices(self, name: str, total: int, first: int = 0) -> set[int] | None:
        """Read a list of layer numbers that count from `first`."""
        full, value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            refuse(full, "a list of layer numbers", value)
        found: set[int] = set()
        for index in cast("list[object]", value):
            number = size(f"{full} entry", index, least=first)
            if number >= first + total or number in found:
                refuse(f"{full} entry", f"distinct and below {first + total}", number)
            found.add(number)
        return found

    def inner(self, name: str) -> Fields:
        """Descend into a nested mapping; an absent one is empty."""
        full, value = self.find(name)
        if value is None:
            return Fields({}, full)
        if not isinstance(value, Mapping):
            refuse(full, "a mapping", value)
        return Fields(cast("Mapping[str, object]", value), full)
