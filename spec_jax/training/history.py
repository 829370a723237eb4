"""report.json of a training run: its settings, and its losses from the first step to the last."""

from __future__ import annotations

import json
import math
import pathlib
import time

import jax
import numpy as np
from ml_collections import ConfigDict

from spec_jax.models.t5 import T5
from spec_jax.run.report import write_text
from spec_jax.text.data import Pairs


class History:
    """Kept over restarts; rows after the checkpoint that a run resumes from are dropped, since it repeats them.

    The file's keys:

        step, steps           steps taken, steps of the whole run
        seconds               of all starts together
        train                 rows of step, steps (how many this row is the mean of), loss (nats per label)
        valid                 rows of step, and loss and (where configured) bleu by validation file
        parameters, pairs, pairs_left_out, device, dtype, config
    """

    def __init__(self, path: pathlib.Path, content: dict):
        self.path, self.content = path, content
        self._before, self._start = content.get('seconds', 0.0), time.monotonic()

    @classmethod
    def open(cls, path: pathlib.Path, step: int) -> History:
        """The report as it was at `step`, or an empty one.

        Raises:
          ValueError: the file is not a report.
        """
        content = {'train': [], 'valid': []}
        if path.exists():
            try:
                content |= json.loads(path.read_text(encoding='utf-8'))
                for name in ('train', 'valid'):
                    content[name] = [row for row in content[name] if row['step'] <= step]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f'{path}: expected a report, got damage; move it away') from error
        return cls(path, content | {'step': step})

    def describe(self, config: ConfigDict, model: T5, pairs: Pairs) -> None:
        """Records the model, the data and the configuration."""
        self.content |= dict(
            steps=config.steps,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(model.params)),
            pairs=len(pairs),
            pairs_left_out=pairs.num_dropped,
            device=jax.devices()[0].device_kind,
            dtype=config.dtype,
            config=config.to_dict(),
        )

    def add_losses(self, step: int, losses: list[jax.Array]) -> float:
        """Adds a row for the steps that end with `step`; returns their mean loss.

        Raises:
          FloatingPointError: it is not finite.
        """
        mean = float(np.mean(jax.device_get(losses), dtype=np.float64))
        if not math.isfinite(mean):
            raise FloatingPointError(
                f'step {step}: expected a finite loss, got {mean}; lower peak_learning_rate or clip, '
                'and go on from an earlier checkpoint or begin in another --workdir'
            )
        self.content['train'].append({'step': step, 'steps': len(losses), 'loss': round(mean, 6)})
        self.content['step'] = step
        return mean

    def add_scores(self, step: int, scores: dict[str, dict[str, float]]) -> None:
        """Adds a validation, {file: {'loss': nats, 'bleu': 0 .. 100}}."""
        self.content['valid'].append({'step': step, 'scores': scores})

    def has_scores(self, step: int) -> bool:
        return any(row['step'] == step for row in self.content['valid'])

    def write(self) -> None:
        """Replaces the file; a reader sees the old one or the new one."""
        self.content['seconds'] = round(self._before + time.monotonic() - self._start, 1)
        write_text(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + '\n')
