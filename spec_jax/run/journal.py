"""A file of finished rows, so that long work can be stopped at any time and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from spec_jax.runtime import processes


@dataclasses.dataclass
class Journal:
    """Records of the finished rows: a line that identifies the run, then a JSON line per row.

    Attributes:
      path: the file; created with the first row.
      run: the settings that the rows depend on, a JSON object.
      records: by row, JSON objects.
    """

    path: pathlib.Path
    run: dict[str, Any]
    records: dict[int, dict[str, Any]]

    @classmethod
    def open(cls, path: pathlib.Path, run: dict[str, Any]) -> Journal:
        """Reads the journal of `run`, if there is one; an incomplete line at its end is cut off.

        Of several processes the first reads and writes, and all get the records.

        Raises:
          ValueError: the file belongs to another run, or is damaged.
          OSError: it cannot be read.
        """
        lines = processes.from_first(lambda: _whole_lines(path))
        if not lines:
            return cls(path, run, {})
        try:
            first, *records = [json.loads(line) for line in lines]
            theirs = dict(first['run'])
            others = [name for name in run if run[name] != theirs.get(name)]
            records = {record.pop('row'): record for record in records}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'{path}: expected a journal of finished rows, got damage; remove it') from error
        if others:
            names = ', '.join(sorted(others))
            raise ValueError(
                f'{path}: expected the same run, got another {names}; use another --workdir, or remove it'
            )
        return cls(path, run, records)

    def add(self, rows: Sequence[int], records: Sequence[dict[str, Any]]) -> None:
        """Appends the records of rows that are not in the journal yet."""
        new = {row: one for row, one in zip(rows, records, strict=True) if row not in self.records}
        self.records |= new
        if not processes.is_first():
            return
        begun = self.path.exists() and self.path.stat().st_size > 0
        lines = [] if begun else [{'run': self.run}]
        lines += [{'row': row, **one} for row, one in new.items()]
        with open(self.path, 'a', encoding='utf-8') as file:
            file.write(''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines))


def _whole_lines(path: pathlib.Path) -> list[str]:
    """The file's lines; a last one without a line feed is cut off the file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b'\n'):
        os.truncate(path, path.stat().st_size - len(lines.pop()))
    return [line.decode(errors='replace') for line in lines]
