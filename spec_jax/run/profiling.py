"""A trace of a run, and its time by part of the loop.

The decoding loop names its parts (`jax.named_scope`: prefill, draft, target, verify, update). The compiler keeps
the names with the operations, and the profiler writes both into one file, an XSpace:

    planes: a host or a device, or the metadata: here the compiled programs, each an HloProto
      lines: a thread, or a unit of the device
        events: an operation's name, its program's name, its start and end
"""

from __future__ import annotations

import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax

from spec_jax.run import report

SCOPES = ('prefill', 'draft', 'target', 'verify', 'update')
# Paths of field numbers in the schemas xplane.proto and hlo.proto, down to a program's operations.
_METADATA, _TITLE = (1, 4, 2), (2,)  # planes, event_metadata, value; name, which is a program's NAME(ID)
_OPERATIONS = (5, 6, 1, 3, 2)  # stats, bytes_value, hlo_module, computations, instructions
_NAME, _PATH = (1,), (7, 2)  # metadata, op_name


@contextmanager
def trace(folder: str | os.PathLike) -> Iterator[None]:
    """Traces what runs within with JAX's profiler, into folder/plugins/profile/TIME.

    Python calls are left out: they slow the run and fill the trace.

    Raises:
      OSError: the folder cannot be written, before any work is done.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(report.make_workdir(folder), profiler_options=options):
        yield


def seconds_by_scope(folder: str | os.PathLike, program: str | None = None) -> dict[str, float]:
    """Seconds in which an operation of each part of the loop ran, in the newest trace of the folder.

    Parts can overlap where a device, or a CPU's threads, run several operations at once.

    Args:
      folder: as of `trace`.
      program: its name in the trace, such as jit_f; None counts the operations of all programs.

    Returns:
      Seconds by each of `SCOPES`, summed over all runs in the trace.

    Raises:
      FileNotFoundError: the folder has no trace.
    """
    paths = sorted(pathlib.Path(folder).glob('plugins/profile/*/*.xplane.pb'))
    if not paths:
        raise FileNotFoundError(
            f'{folder}: expected plugins/profile/TIME/HOST.xplane.pb of a trace; found none'
        )
    written = paths[-1].read_bytes()
    scopes, events = _scopes(written), _events(written)
    spans = {scope: [] for scope in SCOPES}
    for name in scopes.keys() & events.keys():
        if program not in (None, name):
            continue
        for parts, run in _paired(scopes[name], events[name]):
            for operation, span in run:
                if scope := parts.get(operation):
                    spans[scope].append(span)
    return {scope: covered(parts) / 1e9 for scope, parts in spans.items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    length, reached = 0.0, float('-inf')
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _paired(scopes: dict[int, dict], events: dict[int, list]) -> Iterator[tuple[dict, list]]:
    """Each program's scopes with its events, among programs of one name.

    A program from the compilation cache has different numbers in its metadata and in its events; both are in the
    same order.
    """
    if len(scopes) == len(events):
        order = zip(sorted(scopes), sorted(events), strict=True)
    else:
        order = ((number, number) for number in scopes.keys() & events.keys())
    return ((scopes[ours], events[theirs]) for ours, theirs in order)


def _events(written: bytes) -> dict[str, dict[int, list[tuple[str, tuple[float, float]]]]]:
    """(operation, (start, end) in ns), by the program's name and number."""
    events = defaultdict(lambda: defaultdict(list))
    for plane in jax.profiler.ProfileData.from_serialized_xspace(written).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if 'hlo_op' in stats and 'hlo_module' in stats:
                span = event.start_ns, event.start_ns + event.duration_ns
                events[stats['hlo_module']][stats.get('program_id', 0)].append((stats['hlo_op'], span))
    return events


def _scopes(written: bytes) -> dict[str, dict[int, dict[str, str]]]:
    """The scope of each operation that has one, by the program's name and number."""
    scopes = defaultdict(lambda: defaultdict(dict))
    for metadata in _at(written, _METADATA):
        title = re.fullmatch(r'(.*)\((\d+)\)', _text(metadata, _TITLE))
        for operation in _at(metadata, _OPERATIONS) if title else ():
            if scope := re.search(f'/({"|".join(SCOPES)})/', _text(operation, _PATH)):
                scopes[title[1]][int(title[2])][_text(operation, _NAME)] = scope[1]
    return scopes


def _text(message: bytes, path: tuple[int, ...]) -> str:
    return next(_at(message, path), b'').decode()


def _at(message: bytes, path: tuple[int, ...]) -> Iterator[bytes]:
    """Every value at a path of field numbers in a protocol buffer."""
    if not path:
        yield message
        return
    for number, value in _fields(message):
        if number == path[0]:
            yield from _at(value, path[1:])


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of the length-delimited fields; the others are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a byte, seven bits per byte, lowest first; and the index after it."""
    value, shift = 0, 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
