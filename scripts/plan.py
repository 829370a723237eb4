"""Computes the gain of speculation at each draft length from alpha and c; no model needed.

    python scripts/plan.py --alpha=.8 --c=.05

Prints tokens per target call, speed-up and arithmetic operations for each gamma, and which gamma is best; with
--plot=FILE.png draws them.
"""

import pathlib

from absl import flags

from spec_jax.measure import plan
from spec_jax.run import cli

_ALPHA = flags.DEFINE_float(
    'alpha', None, 'Mean probability that a drafted token is accepted.', required=True
)
_C = flags.DEFINE_float(
    'c', None, 'Time of a draft step over that of a plain step of the target.', required=True
)
_C_HAT = flags.DEFINE_float('c_hat', None, 'The same of arithmetic operations; by default c.')
_MAX_GAMMA = flags.DEFINE_integer('max_gamma', 10, 'The longest draft looked at.')
_PLOT = flags.DEFINE_string('plot', None, 'A .png, .svg or .pdf to draw.')


def main(_):
    alpha, c = _ALPHA.value, _C.value
    planned = plan.plan(alpha, c, c if _C_HAT.value is None else _C_HAT.value, _MAX_GAMMA.value)
    print(plan.table(planned))
    print(f'\n{plan.sentence(planned, alpha, c)}')
    if planned['guaranteed']:
        print(
            f'Since alpha > c, some gamma gains at least (1 + alpha) / (1 + c) = {planned["guaranteed"]:.2f}.'
        )
    print('A target call over gamma + 1 positions is taken to cost as much as over one (Theorem 3.8).')
    if _PLOT.value:
        path = pathlib.Path(_PLOT.value)
        if path.suffix not in ('.png', '.svg', '.pdf'):
            raise ValueError(f'plot: expected a name in .png, .svg or .pdf, got {path.name!r}')
        plan.plot(planned, alpha, c).savefig(path, dpi=150)
        print(f'plot: {path}')


if __name__ == '__main__':
    cli.run(main)
