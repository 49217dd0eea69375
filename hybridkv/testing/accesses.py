"""Which global accesses a kernel makes, and how wide the machine's instructions for each of them are.

The size of an access is read from Triton's IR, its width from the code for the target; both name the source line, so
the two are joined on it. Does not compile.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDE = 16  # bytes: the widest access that every target has
_ITEM = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i8": 1, "i16": 2, "f8E4M3FN": 1, "f8E5M2": 1}
_AMD_ITEM = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}
FRAMES = 2  # of inlined functions that a place names: Triton 3.9's code knows no more
Place = tuple[tuple[str, int, int], ...]  # (file, line, column), the innermost first


class Access(NamedTuple):
    """A load or store in the source: bytes of its tile, bytes of it for every lane, and the narrowest instruction.

    Data only: scalars, and the int32 of tables and lengths, are left out.
    """

    where: str
    tile: int
    lane: float
    width: int

    @property
    def hot(self) -> bool:
        """Whether every lane has 16 bytes to move.

        A smaller tile is one instruction of a warp at any width: making it wider would leave lanes idle.
        """
        return self.lane >= WIDE

    @property
    def narrow(self) -> bool:
        """Whether an instruction moves less than 16 bytes."""
        return self.width < WIDE

    def __str__(self) -> str:
        """Describe the access as the report does."""
        return f"{self.where} {8 * self.width} bits, {self.tile} B, {self.lane:g} a lane"


def accesses(compiled: Any) -> list[Access]:
    """Read every access of data; one whose source is not known counts as hot."""
    target = compiled.metadata.target
    lanes = compiled.metadata.num_warps * target.warp_size
    tiles = _tiles(compiled.asm["ttir"])
    # The largest of a line stands for what has no place of its own: merged loads lose their columns.
    lines: dict[Place, int] = {}
    for place, size in tiles.items():
        lines[_line(place)] = max(size, lines.get(_line(place), 0))
    instructions = _ptx(compiled.asm["ptx"]) if target.backend == "cuda" else _amdgcn(compiled.asm["amdgcn"])
    narrowest: dict[Place, int] = {}
    for place, width in instructions:
        narrowest[place] = min(width, narrowest.get(place, width))
    out = []
    for place, width in narrowest.items():
        tile = tiles.get(place, lines.get(_line(place), lanes * WIDE))
        if tile:
            where = " in ".join(f"{file}:{line}" for file, line, _ in place) or "unknown"
            out.append(Access(where, tile, tile / lanes, width))
    return sorted(out)


def narrow_share(found: list[Access]) -> float:
    """Return the share of the tiles' bytes that instructions of less than 128 bits move; loops count once."""
    total = sum(a.tile for a in found)
    return sum(a.tile for a in found if a.narrow) / total if total else 0.0


def _line(place: Place) -> Place:
    return tuple((file, line, 0) for file, line, _ in place)


def _tiles(ttir: str) -> dict[Place, int]:
    """Bytes of every load's and store's tile by its place: 0 for scalars and for indices."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def resolve(text: str) -> Place:
        called = re.fullmatch(r"callsite\((#loc\d*) at (#loc\d*)\)", text)
        if called:
            return resolve(places[called[1]]) + resolve(places[called[2]])
        at = re.fullmatch(r'"([^"]*)":(\d+):(\d+)', text)
        if at:
            return ((at[1].rsplit("/", 1)[-1], int(at[2]), int(at[3])),)
        named = re.search(r"\((#loc\d*)\)$", text)
        return resolve(places[named[1]]) if named else ()

    out: dict[Place, int] = {}
    for kind, place in re.findall(r"tt\.(?:load|store) [^\n]* : (\S+) loc\((#loc\d*)\)$", ttir, re.MULTILINE):
        tensor = re.fullmatch(r"tensor<([\dx]+)x!tt\.ptr<(\w+)>>", kind)
        size = _ITEM.get(tensor[2], 0) if tensor else 0
        for n in tensor[1].split("x") if tensor else ():
            size *= int(n)
        at = resolve(places[place])[:FRAMES]
        out[at] = max(size, out.get(at, 0))
    return out


def _lines(code: str, comment: str) -> Iterator[tuple[Place, str]]:
    """Yield the lines of assembly with the place that the `.loc` above each of them names.

    Inline assembly counts lines of its own: the place is that of its beginning.
    """
    files = {
        number: path.rsplit("/", 1)[-1] for number, path in re.findall(r'\.file\s+(\d+) "([^"]+)"', code)
    }
    place: Place = ()
    inline = False
    for line in code.splitlines():
        if "inline asm" in line:
            inline = "begin" in line
        if line.lstrip().startswith(".loc"):
            names = re.findall(r"([\w.]+):(\d+):(\d+)", line.partition(comment)[2])
            names += [(files[f], *at) for f, *at in re.findall(r"inlined_at (\d+) (\d+) (\d+)", line)]
            if not inline:
                place = tuple((file, int(row), int(column)) for file, row, column in names[:FRAMES])
        else:
            yield place, line


def _ptx(code: str) -> Iterator[tuple[Place, int]]:
    for place, line in _lines(code, "//"):
        plain = re.search(r"\b(?:ld|st)\.global(?:\.[\w:]+?)*?(?:\.v(\d+))?\.[busf](\d+)\s", line)
        if plain:
            yield place, int(plain[1] or 1) * int(plain[2]) // 8
        copied = re.search(r"\bcp\.async\.c[ag]\.shared\.global[^;]*\], (0x[0-9a-f]+|\d+)", line)
        if copied:
            yield place, int(copied[1], 0)


def _amdgcn(code: str) -> Iterator[tuple[Place, int]]:
    for place, line in _lines(code, ";"):
        found = re.search(
            r"\b(?:global|buffer|flat)_(?:load|store)_(?:lds_)?([a-z]+?)(?:_d16\w*)?(?:x(\d))?\s", line
        )
        if found:
            yield place, _AMD_ITEM.get(found[1], 4) * int(found[2] or 1)
