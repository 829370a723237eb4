"""Compares our decoders with transformers' on the same weights, prompts, lengths and gamma, by turns.

    python scripts/compare_transformers.py --config=configs/demo_ende.py --workdir=W
    python scripts/compare_transformers.py --config=configs/demo_ende.py --workdir=W \
        --size=large --config.max_new_tokens=64

Greedy, batch size 1: transformers' `generate`, its assisted generation with the same draft (gamma tokens per draft,
and with the library's defaults), our plain and our speculative decoder. Uses the config's pair and the first 40
lines; with --size=base or large, random weights of T5-base's or T5-large's shape, a draft of T5-small's shape that
agrees with them, and 4 random prompts. data.limit sets the number of either. Writes W/report.json and W/report.md.
transformers' decoders need PyTorch, of requirements-dev.txt.
"""

import dataclasses
import os
import pathlib
import tempfile
import time
from functools import partial
from importlib import metadata

import numpy as np
from absl import flags
from tqdm import tqdm

from spec_jax.drafters.base import Drafter
from spec_jax.drafters.build import build_drafter
from spec_jax.drafters.model import ModelDrafter
from spec_jax.exactness.checks import EPSILON
from spec_jax.measure import comparison, runs, setup
from spec_jax.models import hf_folder, t5_widen
from spec_jax.models.base import Model
from spec_jax.models.load import load_model
from spec_jax.models.t5_weights import save_t5
from spec_jax.run import cli, report

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for report.json and report.md.', required=True)
_SIZE = flags.DEFINE_enum(
    'size', 'pair', ['pair', *t5_widen.SHAPES], "The config's pair, or random weights of this T5's shape."
)
_LINES = 40  # of the pair's data, where data.limit is 0
_PROMPTS, _PROMPT_LENGTH = 4, 64  # random ones, likewise
_AIMS = {
    'pair': {('plain', 'generate'): 1.5, ('speculative', 'assisted'): 3.0},
    'large': {('speculative', 'assisted'): 1.2},
}


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Both libraries' models, loaded from the same files.

    Attributes:
      target, drafter: ours.
      theirs: decoders of `_theirs`.
      sources: int32 [S] each, ending in EOS.
      weights, data: in words.
    """

    target: Model
    drafter: Drafter
    theirs: dict[str, comparison.Decode]
    sources: list[np.ndarray]
    weights: str
    data: str


def main(_):
    config, workdir, start = _CONFIG.value, report.make_workdir(_WORKDIR.value), time.perf_counter()
    settings, torch = _settings(config), _import_torch()
    torch.set_num_threads(_cores())
    if _SIZE.value == 'pair':
        sides = _load_pair(torch, config, settings)
    else:
        sides = _make_pair(torch, config, settings, workdir)
    decoders = sides.theirs | {
        'plain': comparison.ours(runs.plain_program(sides.target, settings)),
        'speculative': comparison.ours(runs.speculative_program(sides.target, sides.drafter, settings)),
    }
    prompts = comparison.prompts_of(sides.sources, settings)
    print(f'{len(prompts)} prompts, {config.repeats} runs of each by {len(decoders)} decoders', flush=True)
    progress = partial(tqdm, unit='prompt', dynamic_ncols=True, desc='comparing')
    results = comparison.measure(decoders, prompts, repeats=config.repeats, progress=progress)

    near_tie, aims = EPSILON[config.dtype], _AIMS.get(_SIZE.value, {})
    rows = comparison.decoder_rows(results)
    ratios = comparison.ratio_rows(results, sides.target, prompts, near_tie, aims)
    shared = comparison.shared_figures(rows, ratios, results)
    facts = _facts(config, sides, rows, shared) | {'seconds in all': f'{time.perf_counter() - start:.0f}'}
    text = comparison.markdown(rows, ratios, sides.weights, near_tie, facts)
    report.write_text(workdir / 'report.md', text)
    compared = dict(size=_SIZE.value, decoders=rows, ratios=ratios, weights=sides.weights, measured_on=facts)
    report.write_report(workdir, shared | compared, config)
    print(f'\n{comparison.decoder_table(rows)}\n\n{comparison.ratio_table(ratios)}\n\n{sides.weights}')
    print(f'tables: {workdir / "report.md"}   figures: {workdir / "report.json"}')


def _facts(config, sides, rows, shared):
    """The setup of the run, for readers of the tables."""
    packages = 'jax', 'transformers', 'torch'
    return {
        'data': sides.data,
        'decoding': f'gamma {config.gamma}, at most {config.max_new_tokens} tokens, {config.repeats} runs of each '
        f'prompt; of our draft {shared["acceptance_rate"]:.3f} of the tested tokens were accepted',
        'device': f'{report.device()}, {_cores()} threads on each side, {config.dtype}',
        'software': ', '.join(f'{name} {metadata.version(name)}' for name in packages),
        'transformers': 'helped in two places where 5.24 goes wrong with a T5: its cache is made as deep as the '
        'decoder, not the encoder, and it is given a decoder mask, without which a draft reads its text twice',
        'seconds that first calls took beyond later ones': ', '.join(
            f'{row["decoder"]} {row["compile_seconds"]:.1f}' for row in rows
        ),
    }


def _cores() -> int:
    """The number of threads that XLA uses."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def _settings(config) -> setup.Settings:
    settings = setup.settings_from(config)
    expected = dict(batch_size=1, temperature=0, lenience=1)  # transformers assists one row at a time
    for name, value in expected.items():
        if config[name] != value:
            raise ValueError(f'{name}: expected {value}, got {config[name]:g}; both sides decode alike')
    if config.draft.kind != 'model':
        raise ValueError(f'draft.kind: expected model, which both sides can have; got {config.draft.kind!r}')
    if not settings.decode.gamma:
        raise ValueError('gamma: expected a draft of 1 token or more, got 0')
    return settings


def _import_torch():
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            'expected PyTorch for the side of transformers, found none; '
            'pip install -r requirements-dev.txt (Python 3.11)'
        ) from error
    return torch


# --- the two sides ------------------------------------------------------------------------------------------


def _load_pair(torch, config, settings) -> _Sides:
    """The config's pair and its lines."""
    job = setup.load(config, settings, default_limit=_LINES)
    drafter = build_drafter(config.draft, job.target, job.tokenizer, config.dtype)
    theirs = _theirs(torch, config.target, config.draft.path, settings, config.dtype)
    weights = f'Target {config.target}, draft {config.draft.path}; how often they agree depends on the pair.'
    data = f'{config.data.path}, {len(job.sources)} lines, {job.num_truncated} of them cut'
    return _Sides(job.target, drafter, theirs, job.sources, weights, data)


def _make_pair(torch, config, settings, workdir) -> _Sides:
    """Random weights of a real shape over a draft of T5-small's, and random prompts."""
    size, (shape, writes) = _SIZE.value, t5_widen.SHAPES[_SIZE.value]
    print(f'making weights of the shapes of T5-{size} and T5-small', flush=True)
    with tempfile.TemporaryDirectory(dir=workdir, prefix='weights.') as folder:
        paths = [pathlib.Path(folder, name) for name in ('target', 'draft')]
        _save_shapes(shape, writes, config, *paths)
        target, draft = (load_model(path, config.dtype) for path in paths)
        # The files are mapped after this and may be deleted.
        theirs = _theirs(torch, *paths, settings, config.dtype)
    random = np.random.default_rng(config.seed)
    tokens = random.integers(3, shape.vocab_size, (config.data.limit or _PROMPTS, _PROMPT_LENGTH), np.int32)
    tokens[:, -1] = shape.eos_id
    weights = (
        f'Target of the shape of T5-{size}, draft of that of T5-small, each with an untied head and random '
        "weights. Agreement is made: the draft's features, heads and layers are part of the target, and what the "
        f'rest of it, random too, writes into the residual stream is multiplied by {writes:g}. Products are dense '
        'and take as long as with any weights. No text ends before its limit.'
    )
    data = f'{len(tokens)} random prompts of {_PROMPT_LENGTH} tokens, seed {config.seed}'
    return _Sides(target, ModelDrafter(draft), theirs, list(tokens), weights, data)


def _save_shapes(shape, writes, config, target_path, draft_path):
    """Writes both models in a separate function, so that no copy stays in memory."""
    draft = t5_widen.endless_t5(t5_widen.SMALL, config.seed)
    save_t5(draft, draft_path, config.dtype)
    target = t5_widen.widen(draft, shape, writes, config.seed + 1)
    save_t5(target, target_path, config.dtype, max_shard_size=10**9)  # a shard is copied on its way


def _theirs(torch, target, draft, settings, dtype) -> dict[str, comparison.Decode]:
    """transformers' three decoders, with its cache of keys and values and otherwise its defaults."""
    import transformers  # after `cli`, which silences its warnings

    transformers.utils.logging.disable_progress_bar()
    load = partial(transformers.T5ForConditionalGeneration.from_pretrained, dtype=getattr(torch, dtype))
    model, assistant = (load(hf_folder.fetch(source)).eval() for source in (target, draft))
    for one in (model, assistant):  # 5.24 makes its cache for as many layers as the encoder has
        one.config.num_layers = one.config.num_decoder_layers
    calls = []
    model.decoder.register_forward_hook(lambda *_: calls.append(1))
    defaults = assistant.generation_config
    by_gamma = transformers.GenerationConfig.from_dict(
        defaults.to_dict()
        | dict(
            num_assistant_tokens=settings.decode.gamma,
            num_assistant_tokens_schedule='constant',
            assistant_confidence_threshold=0.0,  # otherwise drafts of low confidence end early
        )
    )
    # Without a decoder mask, 5.24 makes the draft read its whole text again in addition to its cache.
    assisted = dict(assistant_model=assistant, decoder_attention_mask=torch.ones(1, 1, dtype=torch.int64))

    def decode(prompt, drafts=None):
        if drafts is not None:
            assistant.generation_config = drafts
        calls.clear()
        tokens = torch.from_numpy(prompt.ids.astype(np.int64))[None]
        with torch.inference_mode():
            output = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=settings.decode.max_new_tokens,
                do_sample=False,
                num_beams=1,
                **({} if drafts is None else assisted),
            )
        ids = output[0, 1:].numpy()  # without the start token
        ends = np.flatnonzero(ids == model.config.eos_token_id)
        return comparison.Answer(ids[: ends[0] + 1 if len(ends) else None].astype(np.int32), len(calls))

    return dict(
        generate=decode,
        assisted=partial(decode, drafts=by_gamma),
        assisted_default=partial(decode, drafts=defaults),
    )


if __name__ == '__main__':
    cli.run(main)
