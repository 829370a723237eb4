"""Tests on a pair that speculative decoding does not change the output, or reports by how much it does.

    python scripts/verify.py --config=configs/demo_ende.py --workdir=W

uses the draft, gamma and sampling of the config, and verifies both greedy and sampled decoding (at its temperature,
or 1). Prints a table, one row per check, each with the deviation that it would have detected; writes W/report.json;
exits with 1 where a check fails.
"""

import dataclasses
import sys
import time
from functools import partial

from absl import flags
from tabulate import tabulate
from tqdm import tqdm

from spec_jax import analysis
from spec_jax.drafters.build import build_drafter
from spec_jax.exactness.checks import EPSILON, Pair, choose
from spec_jax.exactness.greedy import greedy
from spec_jax.exactness.rule import closed_form
from spec_jax.exactness.sampled import Size, sampled
from spec_jax.exactness.statistics import FAILS_BELOW, POWER
from spec_jax.measure import setup
from spec_jax.run import cli, report

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for report.json.', required=True)
_progress = partial(tqdm, dynamic_ncols=True)


def main(_):
    verify(_CONFIG.value, report.make_workdir(_WORKDIR.value))


def verify(config, workdir, change=lambda pair: pair):
    """Verifies the pair of a config after `change`, in which tests plant their faults."""
    job = setup.load(config, _settings(config))
    if cut := job.truncation():
        print(cut)
    drafter = build_drafter(config.draft, job.target, job.tokenizer, config.dtype)
    pair = change(Pair(job.target, drafter, job.settings, config.dtype))
    rule = pair.settings.decode.rule
    prompts = [choose(job.sources, config.verify[name]) for name in ('greedy_prompts', 'sampled_prompts')]
    begin = time.perf_counter()
    checks, figures = closed_form(rule, _progress) if config.verify.rule else [], {}
    if drafter is not None:
        more, figures = _loop(pair, *prompts, config)
        checks += more
    figures |= dict(
        lossy=rule.name if rule.lossy else None,
        seconds=time.perf_counter() - begin,
        exact=all(check.passed is not False for check in checks),
        checks=[dataclasses.asdict(check) for check in checks],
    )
    report.write_report(workdir, figures, config)
    print(_table(checks, figures, drafter is None))
    print(f'\nfigures: {workdir / "report.json"}')
    if not figures['exact']:
        sys.exit(1)


def _settings(config):
    """The settings; the sizes of the verification are checked too."""
    if 'verify' not in config:
        raise ValueError('config: expected a section `verify`, as in configs/demo_ende.py; got none')
    settings = setup.settings_from(config)
    sizes = ('greedy_prompts', 0), ('sampled_prompts', 1), ('samples', 0), ('tokens', 1), ('rows', 2)
    for name, lowest in sizes:
        if config.verify[name] < lowest:
            raise ValueError(f'verify.{name}: expected an integer >= {lowest}, got {config.verify[name]}')
    if config.verify.rows < config.verify.sampled_prompts:
        raise ValueError(
            f'verify.rows: expected at least verify.sampled_prompts, {config.verify.sampled_prompts}, '
            f'got {config.verify.rows}: raise it'
        )
    loop = config.draft.kind != 'none' and (config.verify.greedy_prompts or config.verify.samples)
    if not (config.verify.rule or loop):
        raise ValueError('verify: expected the rule, greedy_prompts or samples; all of them are left out')
    if config.dtype not in EPSILON:
        known = ' or '.join(EPSILON)
        raise ValueError(f'dtype: expected {known}, got {config.dtype!r}')
    if config.draft.kind != 'none' and not settings.decode.gamma:
        raise ValueError('gamma: expected 1 or more to verify a draft, got 0')
    return settings


def _loop(pair, greedy_prompts, sampled_prompts, config):
    """Checks of the pair, and the figures of the run at the config's temperature."""
    sizes, checks, figures = config.verify, [], {}
    if greedy_prompts:
        result = greedy(pair, greedy_prompts, _progress)
        checks += result.checks
        figures = analysis.acceptance_figures(result.stats) | result.agreement
    if sizes.samples:
        tokens = max(sizes.tokens, pair.settings.decode.gamma + 3)  # a full acceptance, and a round after it
        size = Size(sizes.samples, tokens, sizes.rows)
        result = sampled(pair, sampled_prompts, size, _progress)
        checks += result.checks
        if config.temperature > 0 or not figures:
            figures |= analysis.acceptance_figures(result.stats)
    return checks, figures


def _table(checks, figures, no_draft):
    """One line per check, then the verdict."""
    verdict = {True: 'ok', False: 'FAIL', None: '-'}
    rows = [
        (verdict[check.passed], check.tier, check.tested, check.samples, check.found, check.finds)
        for check in checks
    ]
    table = tabulate(
        rows,
        headers=('', 'tier', 'tested', 'samples', 'found', 'would find'),
        maxcolwidths=[None, None, 40, 28, 32, 30],
    )
    failed = [check for check in checks if check.passed is False]
    lines = [
        table,
        f'\nA p-value below {FAILS_BELOW:g} fails. What a statistical row would find, it finds {POWER:.0%} of the '
        'time.\n',
    ]
    if figures['lossy']:
        lines.insert(0, f"LOSSY ({figures['lossy']}): the output is not distributed as the target's own\n")
    if failed:
        lines.append(f'NOT EXACT: {len(failed)} of {len(checks)} checks failed ({figures["seconds"]:.0f} s)')
    else:
        what = 'the rule alone; no draft is named, the loop was not run' if no_draft else 'all checks passed'
        lines.append(f'exact, as far as can be seen: {what} ({figures["seconds"]:.0f} s)')
    return '\n'.join(lines)


if __name__ == '__main__':
    cli.run(main)
