"""The shipped pair: English to German, on the sentences that come with it.

    python scripts/generate.py --config=configs/demo_ende.py --workdir=W

translates the 200 shipped sentences; --config.data.path=FILE translates
a file of yours, and --config.compare=True decodes it both ways and measures the speed-up.
"""

from ml_collections import ConfigDict, FieldReference

from spec_jax import demo


def get_config() -> ConfigDict:
    config = dict(
        target=str(demo.TARGET),  # a folder or a hub id
        draft=dict(
            kind='model',  # unigram, bigram, ngram, prompt_lookup, FILE.py:NAME, or none: plain decoding
            path=str(demo.DRAFT),  # of a model
            counts=str(demo.COUNTS),  # of n-grams
            order=3,  # of kind ngram
            max_ngram=3,  # of prompt_lookup: the most tokens that are matched,
            min_ngram=1,  # and the fewest
        ),
        dtype='float32',
        mesh=dict(data=1, model=1),  # devices over which rows, and weights, are split
        gamma=FieldReference(4, field_type=object),  # or auto: measured on a few lines
        batch_size=1,
        max_new_tokens=128,
        max_source_length=128,
        on_long='truncate',  # or 'refuse'
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        lenience=1.0,  # below 1 drafts pass more easily: LOSSY
        seed=0,
        data=dict(
            path=str(demo.SENTENCES),  # a file, or a data set: hf:NAME/CONFIG:SPLIT
            format='',  # empty: by the suffix
            prefix='',
            limit=0,  # number of lines from the first on; 0 takes all
            source_key='source',  # of jsonl and data sets; a dot selects a nested key: translation.en
            target_key='target',
            target_path='',  # of parallel text: a file of references, line by line
        ),
        compare=False,
        repeats=3,  # timed runs of a batch, of which the median counts
        alpha=dict(  # of scripts/measure_alpha.py
            drafts='unigram,bigram,prompt_lookup,model',
            temperatures='0,1',
            tokens=10_000,  # at each temperature; 0 takes all lines
            batch_size=16,
        ),
        benchmark=dict(  # of scripts/benchmark.py, around the first draft at gamma, temperature and batch_size
            drafts='model,bigram,unigram,prompt_lookup',
            temperatures='0,1',
            gammas='2,4,7',
            batch_sizes='1,2,4,8',
            every_combination=False,  # of the four lists, in place of one axis at a time
            lines=16,  # where data.limit is 0
            task='EnDe',  # or CNN/DM: the task of the paper whose figures are shown with ours
            metric='bleu',  # or 'rouge'
        ),
        verify=dict(  # of scripts/verify.py
            rule=True,  # False leaves the accept/resample rule itself out
            greedy_prompts=12,  # 0 leaves greedy decoding out
            sampled_prompts=4,
            samples=768,  # speculative texts, and twice as many plain ones; 0 leaves sampling out
            tokens=7,  # of a sampled text; gamma + 3 where that is more
            rows=64,  # of a batch of them
        ),
    )
    return ConfigDict(config)
