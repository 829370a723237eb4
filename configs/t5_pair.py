"""Any T5 pair on WMT14 English to German or on CNN/DailyMail; the recipes t5_*.py start from this one.

python scripts/benchmark.py --config=configs/t5_pair.py:cnndm --workdir=W \
    --config.target=FOLDER_OR_HUB_ID --config.draft.path=FOLDER_OR_HUB_ID

The data come from the hub (pip install 'datasets>=4'), or from files of yours:
    --config.data.path=news.en.gz --config.data.target_path=news.de.gz
    --config.data.path=test.jsonl, with the keys that stand below
"""

from ml_collections import ConfigDict, FieldReference

DATA = dict(
    wmt_ende=dict(
        path='hf:wmt/wmt14/de-en:test',  # 3,003 sentences
        prefix='translate English to German: ',
        source_key='translation.en',
        target_key='translation.de',
    ),
    cnndm=dict(
        path='hf:abisee/cnn_dailymail/3.0.0:test',  # 11,490 articles
        prefix='summarize: ',
        source_key='article',
        target_key='highlights',
    ),
)
BENCHMARK = dict(
    wmt_ende=dict(task='EnDe', metric='bleu', gammas='3,5,7', lines=100),
    cnndm=dict(task='CNN/DM', metric='rouge', gammas='1,3,5', lines=50),
)
# The paper's draft lengths at temperature 0 (Table 2), by draft.
GAMMA = dict(wmt_ende=dict(small=7, base=7, large=7), cnndm=dict(small=5, base=5, large=3))


def paper_pair(task, target, draft, name) -> ConfigDict:
    """`target` and `draft` are sizes, `name` a folder or a hub id with {} in the size's place."""
    gammas = GAMMA[task]
    if draft not in gammas:
        raise ValueError(f'expected one of {", ".join(gammas)} after the colon; got {draft!r}')
    return get_config(task, name.format(target), name.format(draft), gammas[draft])


def get_config(task='wmt_ende', target='./target', draft='./draft', gamma=5) -> ConfigDict:
    if task not in DATA:
        raise ValueError(f'expected one of {", ".join(DATA)} after the colon; got {task!r}')
    return ConfigDict(
        dict(
            target=target,
            draft=dict(kind='model', path=draft, counts='', order=3, max_ngram=3, min_ngram=1),
            dtype='bfloat16',  # float32 on a CPU
            mesh=dict(data=1, model=1),  # devices over which rows, and weights, are split
            gamma=FieldReference(gamma, field_type=object),  # or auto: measured on a few lines
            batch_size=1,
            max_new_tokens=128,
            max_source_length=512,  # what T5 was trained with; longer sources are cut and counted
            on_long='truncate',
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            lenience=1.0,  # below 1: LOSSY
            seed=0,
            data=dict(format='', target_path='', limit=0) | DATA[task],
            compare=False,
            repeats=3,
            alpha=dict(drafts='prompt_lookup,model', temperatures='0,1', tokens=10_000, batch_size=8),
            benchmark=dict(
                drafts='model,prompt_lookup',
                temperatures='0,1',
                batch_sizes='1,2,4,8',
                every_combination=False,
                **BENCHMARK[task],
            ),
            verify=dict(rule=True, greedy_prompts=12, sampled_prompts=4, samples=2048, tokens=7, rows=16),
        )
    )
