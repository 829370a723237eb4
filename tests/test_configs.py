"""Every recipe in configs/, loaded as the scripts load it, and held against what they read of it."""

import ast
import json
import pathlib
import re

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from spec_jax import analysis, demo
from spec_jax.drafters.build import build_drafter
from spec_jax.measure import agreement, runs, setup
from spec_jax.text.data import Example
from spec_jax.training import ngram, recipe

ROOT = pathlib.Path(__file__).parents[1]
TRAINING = {'train_demo_target.py', 'train_demo_draft.py', 'train_ngram_demo.py', 'distill_demo.py'}
FILES = sorted(path.name for path in (ROOT / 'configs').glob('*.py'))
DECODING = [
    *(name for name in FILES if name not in TRAINING),
    *(f'{name}:cnndm' for name in ('t5_pair.py', 't5_3b.py', 't5_large.py')),
    *(f't5_{pair}_{task}.py:{draft}' for pair in ('v1_0_11b', 'v1_1_xxl') for task in ('wmt_ende', 'cnndm')
      for draft in ('base', 'large')),
]  # fmt: skip
READERS = 'generate', 'verify', 'measure_alpha', 'benchmark_overhead', 'benchmark'  # scripts


def load(name: str, *overrides: str) -> ConfigDict:
    argv = ['script', f'--config={ROOT / "configs" / name}', *overrides]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    values(argv)
    return holder.value


def keys_read(path: pathlib.Path) -> set[str]:
    """'draft.kind' for each `config.draft.kind` in a file."""
    names_read = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if names and isinstance(node, ast.Name) and node.id == 'config':
            names_read.add('.'.join(names))
    return names_read


def lacks(config: ConfigDict, key: str) -> bool:
    """An attribute or method of a value is no key."""
    for name in key.split('.'):
        if not isinstance(config, ConfigDict) or hasattr(ConfigDict, name):
            return False
        if name not in config:
            return True
        config = config[name]
    return False


def leaves(config: ConfigDict, outer='') -> dict[str, type]:
    kinds = {}
    for key, value in config.items():
        section = isinstance(value, ConfigDict)
        kinds |= leaves(value, f'{outer}{key}.') if section else {f'{outer}{key}': type(value)}
    return kinds


def test_the_reader_of_scripts_reads():
    assert {'compare', 'repeats', 'temperature', 'draft'} <= keys_read(ROOT / 'scripts/generate.py')
    assert {'alpha.drafts', 'alpha.tokens', 'data.path'} <= keys_read(ROOT / 'scripts/measure_alpha.py')
    config = ConfigDict(dict(data=dict(path='a')))
    assert lacks(config, 'gamma') and lacks(config, 'data.prefix')
    assert not lacks(config, 'data.path.name') and not lacks(config, 'data.to_dict')


@pytest.mark.parametrize('name', DECODING)
def test_a_recipe_has_every_key_that_the_scripts_read(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a recipe finds its base wherever it is called from
    config = load(name, '--config.seed=3')
    assert config.seed == 3 and config.draft.kind == 'model'
    scripts = [path for name in READERS if (path := ROOT / 'scripts' / f'{name}.py').exists()]
    for path in (*scripts, ROOT / 'spec_jax/measure/setup.py'):
        assert [key for key in sorted(keys_read(path)) if lacks(config, key)] == [], path.name
    reads = keys_read(ROOT / 'spec_jax/drafters/build.py')
    assert reads >= {'path', 'counts'} and [key for key in reads if lacks(config.draft, key)] == []
    # Some sections are read by index, which no reader of scripts sees: they are as in the first recipe.
    assert leaves(config) == leaves(load('demo_ende.py'))
    settings = setup.settings_from(config)
    assert settings.decode.gamma == config.gamma and settings.batch_size == 1
    assert config.verify.rows >= config.verify.sampled_prompts and config.alpha.tokens >= 10_000


@pytest.mark.parametrize('name', FILES)
def test_a_recipe_is_short_and_contains_its_command(name):
    text = (ROOT / 'configs' / name).read_text()
    assert len(text.splitlines()) < 80
    (command,) = set(re.findall(rf'--config=configs/({name})', text.split('"""')[1]))
    assert command == name and 'python scripts/' in text.split('"""')[1]


@pytest.mark.parametrize('name', [name for name in DECODING if name.startswith('t5_') and 'pair' not in name])
def test_what_a_recipe_expects_is_theorem_3_8s_and_not_called_measured(name):
    config, doc = load(name), (ROOT / 'configs' / name.partition(':')[0]).read_text().split('"""')[1]
    row = r'^ *(wmt_ende|cnndm)? +(small|base|large) +([01]) +(\d+) +(\.\d+) +(\.\d+) +(\d\.\d+)$'
    rows = re.findall(row, doc, re.MULTILINE)
    assert len(rows) >= 6 and 'Expected, not measured' in doc and 'Weights:' in doc and 'Chip:' in doc
    for _, _, _, gamma, alpha, c, speedup in rows:
        exact = analysis.walltime_improvement(float(alpha), int(gamma), float(c))
        assert abs(exact - float(speedup)) < 0.0051, (alpha, gamma, c)
    task = 'cnndm' if 'cnn' in config.data.path else 'wmt_ende'
    own_rows = [row for row in rows if row[0] in ('', task) and row[1] in config.draft.path and row[2] == '0']
    assert [int(row[3]) for row in own_rows] == [config.gamma]


def test_tasks_have_t5s_prefixes_and_the_data_sets_keys():
    ende, cnndm = load('t5_large.py').data, load('t5_large.py:cnndm').data
    assert (ende.prefix, ende.source_key, ende.target_key) == (
        'translate English to German: ',
        'translation.en',
        'translation.de',
    )
    assert (cnndm.prefix, cnndm.source_key, cnndm.target_key) == ('summarize: ', 'article', 'highlights')
    assert load('t5_v1_0_11b_cnndm.py:base').draft.path == 'google-t5/t5-base'


@pytest.mark.parametrize(
    'name, message',
    [
        ('t5_large.py:xsum', "expected one of wmt_ende, cnndm after the colon; got 'xsum'"),
        ('t5_pair.py:xsum', "expected one of wmt_ende, cnndm after the colon; got 'xsum'"),
        ('t5_v1_0_11b_cnndm.py:xl', "expected one of small, base, large after the colon; got 'xl'"),
        ('t5_v1_1_xxl_wmt_ende.py:xl', "expected one of small, base, large after the colon; got 'xl'"),
    ],
)
def test_the_argument_after_the_colon_is_checked(name, message):
    with pytest.raises(flags.IllegalFlagValueError, match=re.escape(message)):
        load(name)


def test_training_recipes_have_their_keys():
    given = ['--config.data.train=a.tsv', '--config.tokenizer=b']
    for name in ('train_demo_target.py', 'train_demo_draft.py'):
        recipe.check_recipe(load(name, *given))
    ngram._check(load('train_ngram_demo.py', *given))
    config = load('distill_demo.py')
    assert [key for key in keys_read(ROOT / 'scripts/distill.py') if lacks(config, key)] == []


@pytest.fixture(scope='module')
def articles(tmp_path_factory):
    """Three lines shaped like CNN/DailyMail, the second of more than 512 tokens."""
    path = tmp_path_factory.mktemp('articles') / 'test.jsonl'
    sentence = 'The children have been sleeping outdoors because of the aftershocks . '
    records = [
        dict(id=n, article=sentence * times, highlights='Children sleep outdoors .')
        for n, times in enumerate((2, 60, 1))
    ]
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    return path


def test_the_demo_pair_decodes_long_articles_and_counts_those_that_were_cut(articles):
    config = load(
        'demo_ende.py',
        f'--config.data.path={articles}',
        '--config.data.source_key=article',
        '--config.data.target_key=highlights',
        '--config.max_source_length=512',
        '--config.max_new_tokens=5',
        '--config.gamma=2',
    )
    job = setup.load(config, setup.settings_from(config))
    assert [len(source) for source in job.sources][1] == 512 and max(map(len, job.sources)) == 512
    assert job.num_truncated == 1 and job.truncation() == '1 of 3 sources cut to 512 tokens'
    assert job.examples[2].target == 'Children sleep outdoors .'
    shapes = {batch.tokens.shape for batch, _, _ in runs.batches(job.sources, job.settings)}
    assert len(shapes) <= 3 and (1, 512) in shapes
    drafter = build_drafter(config.draft, job.target, job.tokenizer, config.dtype)
    settings = setup.one_width(job.settings, job.sources)  # one shape: compiling is most of the time
    plain = runs.decode_lines(job.sources, settings, runs.plain_program(job.target, settings))
    program = runs.speculative_program(job.target, drafter, settings)
    fast = runs.decode_lines(job.sources, settings, program)
    assert agreement.agreement(job.target, job.sources, plain.ids, fast.ids)['greedy_match'] == 1.0
    assert all(0 < len(ids) <= 5 for ids in fast.ids)


def examples_of(tmp_path, **where):
    """What `setup.load` reads; the demo pair costs half a second."""
    config = load('demo_ende.py')
    config.data.update(where)
    return setup.load(config, setup.settings_from(config)).examples


def test_parallel_text_by_the_configs_keys(tmp_path):
    source, target = tmp_path / 'a.en', tmp_path / 'a.de'
    source.write_text('One .\nTwo .\n')
    target.write_text('Eins .\nZwei .\n')
    where = dict(path=str(source), target_path=str(target))
    assert examples_of(tmp_path, **where) == [Example('One .', 'Eins .'), Example('Two .', 'Zwei .')]
    assert examples_of(tmp_path, **where, limit=1) == [Example('One .', 'Eins .')]
    target.write_text('Eins .\n')
    with pytest.raises(ValueError, match='a.de: expected 2 lines, one for each of .*a.en; got 1'):
        examples_of(tmp_path, **where, limit=1)
    with pytest.raises(ValueError, match='data.target_path: expected none beside a data set; got b.de'):
        examples_of(tmp_path, path='hf:wmt14/de-en:test', target_path='b.de')


def test_a_recipe_of_old_without_the_new_keys_still_decodes(tmp_path):
    config = ConfigDict(load('demo_ende.py').to_dict())
    for key in ('source_key', 'target_key', 'target_path'):
        del config.data[key]
    config.data.limit = 2
    job = setup.load(config, setup.settings_from(config))
    assert len(job.examples) == 2 and job.examples[0].target
    assert all(np.issubdtype(source.dtype, np.int32) for source in job.sources)
    assert config.data.path == str(demo.SENTENCES)
