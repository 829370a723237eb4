"""Reads an optimized TPU program: estimated cycles, loops, copies, collectives.

XLA's TPU compiler writes `estimated_cycles` on each operation that it schedules. The body of a loop counts as often
as the loop runs, where its condition compares a counter with a constant, else once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(')
_LINE = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r'(condition|body)=%?([\w.\-]+)')
_BOUND = re.compile(r' = s32\[\]\S* constant\((\d+)\)')
_ARRAY = re.compile(r'(pred|bf16|[suf]\d+)\[([\d,]*)\](?:\{([^}]*)\})?')
_SPACE = re.compile(r'S\((\d+)\)')
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
_COPIES = ('copy', 'transpose', 'copy-start')


@dataclasses.dataclass(frozen=True)
class Operation:
    """A line of a computation.

    Attributes:
      name: as in the program.
      kind: HLO's opcode.
      shape: of the result, as text.
      cycles: estimated; 0 where the compiler gives none.
      scope: jax's name stack.
      called: `condition` and `body` of a loop.
    """

    name: str
    kind: str
    shape: str
    cycles: int
    scope: str
    called: dict[str, str]

    @property
    def bytes(self) -> int:
        """Size of the largest array among the results."""
        return max((_size(*array[:2]) for array in _ARRAY.findall(self.shape)), default=0)

    @property
    def prefetches(self) -> bool:
        """Whether it copies an array to or from on-chip memory while other operations run."""
        return self.kind == 'copy-start' and bool(_SPACE.search(self.shape.partition('u32[]')[0]))


def _size(dtype: str, dims: str) -> int:
    bits = int(re.sub(r'\D', '', dtype) or 8)
    return math.prod(int(dim) for dim in dims.split(',') if dim) * bits // 8


class Program:
    """The computations of an optimized program.

    Attributes:
      entry: name of the entry computation.
    """

    def __init__(self, text: str):
        self._lines: dict[str, list[str]] = {}
        self.entry, lines = '', []
        for line in text.splitlines():
            if not line.startswith(' ') and line.endswith('{') and (head := _HEAD.match(line)):
                lines = self._lines[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            else:
                lines.append(line)

    def operations(self, computation: str) -> Iterator[Operation]:
        """The operations of a computation, without those of computations that it calls."""
        for line in self._lines[computation]:
            if match := _LINE.match(line):
                cycles, scope = _CYCLES.search(line), _SCOPE.search(line)
                yield Operation(
                    name=match[1],
                    kind=match[3],
                    shape=match[2],
                    cycles=int(cycles[1]) if cycles else 0,
                    scope=scope[1] if scope else '',
                    called=dict(_CALLED.findall(line)) if match[3] == 'while' else {},
                )

    def loops(self, computation: str) -> list[Operation]:
        return [one for one in self.operations(computation) if one.kind == 'while']

    def trips(self, loop: Operation) -> int | None:
        """How often a loop runs, where its condition compares with a constant; else None."""
        condition = '\n'.join(self._lines[loop.called['condition']])
        bounds = _BOUND.findall(condition)
        return int(bounds[0]) if len(bounds) == 1 and 'direction=LT' in condition else None

    def cycles(self, computation: str) -> int:
        """Cycles of one run, loops included; a loop whose number of runs is unknown counts once."""
        total = sum(one.cycles for one in self.operations(computation))
        return total + sum(
            self.cycles(one.called['body']) * (self.trips(one) or 1) for one in self.loops(computation)
        )

    def by_scope(self, computation: str, scopes: tuple[str, ...]) -> dict[str, float]:
        """Cycles of one run by the first of `scopes` in the name stack, loops within included; '' for the rest."""
        total: Counter[str] = Counter()
        for one in self.operations(computation):
            scope = next((name for name in scopes if f'/{name}/' in f'{one.scope}/'), '')
            total[scope] += one.cycles
            if one.kind == 'while':
                for inner, cycles in self.by_scope(one.called['body'], scopes).items():
                    total[inner or scope] += cycles * (self.trips(one) or 1)
        return dict(total)

    def copies(self, computation: str, dtype: str, least: int) -> list[Operation]:
        """Copies and transposes of arrays of `dtype`, such as bf16, of `least` bytes and more.

        Loops within are included; copies to and from on-chip memory are left out.
        """
        large = []
        for one in self.operations(computation):
            copies = one.kind in _COPIES or (one.kind == 'fusion' and re.match('copy|transpose', one.name))
            if copies and dtype in one.shape and one.bytes >= least and not one.prefetches:
                large.append(one)
        return large + [
            copy
            for loop in self.loops(computation)
            for copy in self.copies(loop.called['body'], dtype, least)
        ]

    def collectives(self, computation: str) -> dict[str, tuple[int, int]]:
        """Number and bytes of one run's collectives by kind, loops within included."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for one in self.operations(computation):
            kind = one.kind.removesuffix('-start')
            if kind in COLLECTIVES:
                count[kind] += 1
                size[kind] += one.bytes
        for loop in self.loops(computation):
            for kind, (number, amount) in self.collectives(loop.called['body']).items():
                count[kind] += number * (self.trips(loop) or 1)
                size[kind] += amount * (self.trips(loop) or 1)
        return {kind: (count[kind], size[kind]) for kind in count}
