"""train.py and distill.py as their users see them when something is wrong."""

from tiny import ROOT, run_forked


def assert_mistakes(script, workdir, command_lines):
    """Each command line ends in its expected line on stderr and leaves no files."""
    lines = [[f'--workdir={workdir}', *arguments] for arguments in command_lines.values()]
    results = run_forked(ROOT / f'scripts/{script}.py', lines, workdir)
    for message, (code, out, err) in zip(command_lines, results, strict=True):
        assert (code, out, err.count('\n')) == (1, '', 1), err
        assert err.startswith('error: ') and message in err
    assert not workdir.exists()


def test_mistakes_in_training(tmp_path):
    config = '--config=configs/train_demo_draft.py'
    data = '--config.data.train=/nowhere.tsv'
    (tmp_path / 'empty').mkdir()
    commands = {
        '--config.data.trian: the configuration has no such key; did you mean train?': [
            config,
            '--config.data.trian=x',
        ],
        '--config.nope: the configuration has no such key; see the file': [config, '--config.nope=1'],
        "--config: expected a Python file; got 'configs/nowhere.py'": ['--config=configs/nowhere.py'],
        '--config must have a value': [],
        "--config.steps=many: invalid literal for int() with base 10: 'many'": [
            config,
            '--config.steps=many',
        ],
        'steps: expected a number of 1 or more, got 0': [config, '--config.steps=0'],
        'data.train: expected files of pairs, got none': [config],
        'tokenizer: expected a folder or hub id, got none': [config, data],
        '/nowhere: expected a folder with a tokenizer': [config, data, '--config.tokenizer=/nowhere'],
        f'{tmp_path}/empty: expected a tokenizer': [config, data, f'--config.tokenizer={tmp_path}/empty'],
    }
    assert_mistakes('train', tmp_path / 'workdir', commands)


def test_mistakes_in_distillation(tmp_path):
    config = '--config=configs/distill_demo.py'
    (tmp_path / 'sources.txt').write_text('One line.\n')
    commands = {
        'got /nowhere.tsv, which does not exist': [config, '--config.data.train=/nowhere.tsv'],
        'data.train: expected files, got none': [config],
        '/nowhere: expected a folder with config.json': [
            config,
            '--config.target=/nowhere',
            f'--config.data.train={tmp_path}/sources.txt',
        ],
    }
    assert_mistakes('distill', tmp_path / 'workdir', commands)
