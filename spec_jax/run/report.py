"""The output of a run: report.json with documented keys, texts, and a table on the screen."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any

import jax
from ml_collections import ConfigDict
from tabulate import tabulate

from spec_jax import analysis
from spec_jax.runtime import processes, sharding

# The keys of report.json that every run has, in this order; None where a run did not measure one.
KEYS = (
    'tokens',
    'rounds',
    'tokens_per_call',
    'alpha',
    'acceptance_rate',
    'accepted_histogram',
    'c',
    'cost_of_rows',
    'plain_tokens_per_s',
    'tokens_per_s',
    'speedup',
    'predicted_speedup',
    'attainable_speedup',
    'greedy_match',
    'device',
    'dtype',
    'config',
)


def make_workdir(path: str | os.PathLike) -> pathlib.Path:
    """Creates the folder and checks that it can be written; of several processes only the first does so.

    Raises:
      OSError: it cannot be written; raised before any work is done.
    """
    folder = pathlib.Path(path)

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()

    processes.from_first(make)
    return folder


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a temporary file and renames it, so that the file is never half-written.

    Of several processes only the first does so.
    """
    if not processes.is_first():
        return
    partial = path.with_name(path.name + '.partial')
    try:
        partial.write_text(text, encoding='utf-8')
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def device() -> str:
    """The device of the run, such as 'cpu: cpu'; with ' x SIZE' for a mesh."""
    one, mesh = jax.devices()[0], sharding.mesh_in_use()
    return f'{one.platform}: {one.device_kind}' + (f' x {mesh.size}' if mesh else '')


def write_report(workdir: pathlib.Path, figures: dict[str, Any], config: ConfigDict) -> dict[str, Any]:
    """Writes report.json: `KEYS`, filled from `figures` or None, then all other figures.

    Returns:
      The report.
    """
    report: dict[str, Any] = dict.fromkeys(KEYS)
    report |= dict(device=device(), dtype=config.dtype, config=config.to_dict())
    report |= figures
    write_text(workdir / 'report.json', json.dumps(report, indent=2, ensure_ascii=False) + '\n')
    return report


# The label of each figure on the screen, in this order.
_LABELS = dict(
    lines='lines',
    tokens='tokens',
    alpha='alpha, mean of sum min(p, q)',
    acceptance_rate='acceptance rate, accepted / tested',
    tokens_per_call='tokens per target call',
    c='c, draft step / plain step',
    cost_of_rows='target call over gamma + 1 rows / plain step',
    plain_tokens_per_s='tokens/s, plain',
    tokens_per_s='tokens/s, speculative',
    speedup='speed-up, measured',
    attainable_speedup='speed-up attainable: tokens per call / (gamma c + cost of calls)',
    predicted_speedup='speed-up predicted (Theorem 3.8)',
    speedup_with_prefill='speed-up with prefill',
    greedy_match='greedy_match, share of lines equal to plain decoding',
    bleu='BLEU',
)


def summary(figures: dict[str, Any]) -> str:
    """The measured figures, one per line, and a warning where plain decoding should be faster."""
    rows = [(label, figures[name]) for name, label in _LABELS.items() if figures.get(name) is not None]
    table = tabulate(rows, floatfmt='.3g', tablefmt='plain')
    if warning := _slower(figures):
        table += f'\n{warning}'
    if figures.get('lossy'):
        table = f"LOSSY ({figures['lossy']}): the output is not distributed as the target's own\n{table}"
    return table


def _slower(figures: dict[str, Any]) -> str:
    """Advice where a speed-up below 1 is predicted, by Theorem 3.8 or with the cost of rows; else empty."""
    predicted, attainable = (figures.get(name) for name in ('predicted_speedup', 'attainable_speedup'))
    if predicted is not None and predicted < 1:
        best = analysis.best_gamma(figures['alpha'], figures['c'])
        advice = (
            f'gamma {best} suits this draft best'
            if best
            else 'no gamma gains with this draft; gamma 0 decodes plainly'
        )
        return f'WARNING: slower than plain decoding, predicted {predicted:.3g} times as fast: {advice}'
    if attainable is not None and attainable < 1:
        return (
            f'WARNING: slower than plain decoding, at most {attainable:.3g} times as fast: a target call over '
            f'gamma + 1 rows costs {figures["cost_of_rows"]:.3g} plain steps, so try a smaller batch or gamma'
        )
    return ''
