"""Converts a T5 between the forms it is stored in, a parameter at a time.

    python scripts/convert.py --source=FOLDER --output=FOLDER --format=hf
    python scripts/convert.py --source=FOLDER --output=FOLDER --format=orbax --dtype=bfloat16

The source is a T5X checkpoint, a folder in Hugging Face's layout (or a hub id), or an Orbax checkpoint of this
script; its tokenizer files are copied. An interrupted run leaves no folder that looks complete.
"""

import math
import re

from absl import flags

from spec_jax.models.convert import FORMATS, convert
from spec_jax.models.t5_stored import leaf_shapes
from spec_jax.run import cli

_SOURCE = flags.DEFINE_string('source', None, 'Folder or hub id of the T5.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder to write to.', required=True)
_FORMAT = flags.DEFINE_enum('format', None, FORMATS, 'Form of the output.', required=True)
_DTYPE = flags.DEFINE_string('dtype', None, "float32 or bfloat16, by default the source's.")
_MAX_SHARD_SIZE = flags.DEFINE_string('max_shard_size', '5GB', 'Size of a safetensors file: 5GB, 500MB.')
_D_KV = flags.DEFINE_integer(
    'd_kv', None, "Width of a head that a T5X source must have; by default what its arrays' shapes say."
)
_UNITS = {'KB': 10**3, 'MB': 10**6, 'GB': 10**9}


def main(_):
    size = _bytes(_MAX_SHARD_SIZE.value)
    stored, dtype = convert(
        _SOURCE.value, _OUTPUT.value, _FORMAT.value, _DTYPE.value, max_shard_size=size, d_kv=_D_KV.value
    )
    parameters = sum(map(math.prod, leaf_shapes(stored.config).values()))
    gigabytes = parameters * dtype.itemsize / 1e9
    print(f'{_OUTPUT.value}: {parameters:,} parameters as {dtype.name}, {gigabytes:.2f} GB')


def _bytes(text: str) -> int:
    """'5GB' -> 5,000,000,000."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?)([KMG]B)', text.upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f'max_shard_size: expected a size such as 5GB or 500MB, got {text!r}; correct it')
    return size


if __name__ == '__main__':
    cli.run(main)
