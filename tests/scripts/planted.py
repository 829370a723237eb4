"""scripts/verify.py with a fault planted in the library: --fault=NAME, one of `FAULTS`."""

import importlib
import importlib.util
import inspect
import pathlib
import sys
import textwrap

from absl import flags

from spec_jax.measure import pipeline  # noqa: F401  the one forked.py runs, the other it imports before it forks
from spec_jax.run import cli  # noqa: F401  the one forked.py runs, the other it imports before it forks

# Where a fault is planted, and what it puts in place of what.
FAULTS = {
    'q of other logits': (
        'spec_jax.drafters.base:draw',
        'return sample(keys, probs), probs',
        'return sample(keys, probs), logits_to_probs(logits[:, ::-1], sampling)',
    ),
    'q at another temperature': (
        'spec_jax.drafters.base:draw',
        'return sample(keys, probs), probs',
        'return sample(keys, logits_to_probs(logits / 2, sampling)), probs',
    ),
    'q does not sum to 1': (
        'spec_jax.drafters.base:draw',
        'return sample(keys, probs), probs',
        'return sample(keys, probs), 0.9 * probs',
    ),
    'draft off the cache by one': (
        'spec_jax.drafters.model:ModelDrafter.propose',
        'last_tokens(context, 2)',
        'last_tokens(context, 1)',
    ),
    'epsilon in the residual': (
        'spec_jax.verification:residual_distribution',
        'excess = jnp.maximum(p - q, 0.0)',
        'excess = jnp.maximum(p - q, 0.0) + 1e-5',
    ),
    'accepts at equality': (
        'spec_jax.verification:verify_chain',
        'uniform * q_token < p_token',
        'uniform * q_token <= p_token',
    ),
    'accepts too easily': (
        'spec_jax.verification:verify_chain',
        'uniform * q_token < p_token',
        'uniform * q_token < 1.0001 * p_token',
    ),
    'one number for all tests': (
        'spec_jax.verification:verify_chain',
        'split_rows(accept_keys, num_draft).T',
        'jnp.stack([accept_keys] * num_draft, axis=1)',
    ),
    'greedy, any token passes': (
        'spec_jax.verification:verify_greedy',
        'draft.tokens == best[:, :-1]',
        'draft.tokens >= 0',
    ),
    'bonus from the last residual': (
        'spec_jax.verification:_next_distribution',
        'rejected = num_accepted < draft.length',
        'rejected = num_accepted <= draft.length',
    ),
    'batch minimum': (
        'spec_jax.decoding:speculative_step',
        'verified, failed = found.verified, jnp.where(state.done, 0, found.failed)',
        'verified, failed = found.verified, jnp.where(state.done, 0, found.failed)\n'
        '        least = jnp.where(state.done, gamma, verified.num_accepted).min()\n'
        '        verified = verified.replace(num_accepted=jnp.full_like(verified.num_accepted, least))',
    ),
    'keys shared between rows': (
        'spec_jax.decoding:speculative_step',
        'state.round))(state.keys)',
        'state.round))(jnp.stack([state.keys[0]] * len(state.done)))',
    ),
    'stale slot in the target cache': (
        'spec_jax.decoding:speculative_step',
        'target.rollback(target_cache, context.length - 1)',
        'target.rollback(target_cache, context.length)',
    ),
    'tokens behind EOS': ('spec_jax.decoding:_emit', 'first_eos + 1)', 'first_eos + 2)'),
    'counts what was not tested': (
        'spec_jax.decoding:_count',
        'tested = jnp.minimum(emitted, draft.length)',
        'tested = draft.length',
    ),
}

_FAULT = flags.DEFINE_string('fault', '', 'Name of the fault; empty for none.')
_path = pathlib.Path(__file__).parents[2] / 'scripts' / 'verify.py'
_spec = importlib.util.spec_from_file_location('verify', _path)
verify = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(verify)


def plant(name: str) -> None:
    """Rewrites a function's source, here and in every module that has imported it."""
    where, old, new = FAULTS[name]
    module, _, qualified = where.partition(':')
    *owner, function = qualified.split('.')
    module = importlib.import_module(module)
    holder = getattr(module, owner[0]) if owner else module
    sound = getattr(holder, function)
    source = textwrap.dedent(inspect.getsource(sound))
    assert source.count(old) == 1, f'{name}: the source has changed; look for {old!r}'
    names = dict(vars(module))
    exec(source.replace(old, new), names if owner else vars(module))
    if owner:
        setattr(holder, function, names[function])
    for other in [value for key, value in sys.modules.items() if key.startswith('spec_jax')]:
        for key, value in list(vars(other).items()):
            if value is sound:
                setattr(other, key, vars(module)[function])


def main(argv):
    if _FAULT.value:
        plant(_FAULT.value)
    verify.main(argv)


if __name__ == '__main__':
    cli.run(main)
