"""Arrays stored as zarr, read through TensorStore: T5X's, and those of an Orbax checkpoint."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Set

import numpy as np
import tensorstore as ts

from spec_jax.models.hf_folder import listed

# Chunks read at once; all of them at once would hold the array twice, packed and unpacked.
_CONTEXT = ts.Context({'file_io_concurrency': {'limit': 4}})
_FLOATS = ('float64', 'float32', 'float16', 'bfloat16')


class Arrays:
    """The arrays of a folder by name, read on demand.

    Args:
      folder: for messages.
      names: of the arrays in it.
      kvstore: TensorStore's kvstore specification for the array of a name.
    """

    def __init__(self, folder: pathlib.Path, names: Iterable[str], kvstore: Callable[[str], dict]):
        self.folder = folder
        self.names = frozenset(names)
        self._kvstore = kvstore
        self._opened = {}

    def expect(self, names: Set[str], what: str) -> None:
        """Raises ValueError unless all these arrays are there, and no others."""
        expected = f'{self.folder}: expected the {len(names)} arrays of {what}'
        if missing := names - self.names:
            raise ValueError(f'{expected}, got no {listed(missing)}; complete the copy')
        if extra := self.names - names:
            raise ValueError(f'{expected}, got {listed(extra)} besides; use a plain T5')

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(name).shape)

    def dtype(self, name: str) -> np.dtype:
        return self._open(name).dtype.numpy_dtype

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """An array as it is stored, or a part of it; ValueError where it is damaged or incomplete."""
        try:
            return self._open(name)[index].read().result()
        except Exception as error:  # TensorStore raises many kinds
            raise ValueError(self._damaged(name, error)) from error

    def _open(self, name: str) -> ts.TensorStore:
        if name in self._opened:
            return self._opened[name]
        # By default a missing chunk would be read as zeros.
        spec = {'driver': 'zarr', 'kvstore': self._kvstore(name), 'fill_missing_data_reads': False}
        try:
            array = ts.open(spec, open=True, read=True, context=_CONTEXT).result()
        except Exception as error:
            raise ValueError(self._damaged(name, error)) from error
        if array.dtype.name not in _FLOATS:
            raise ValueError(
                f'{self.folder}: expected floats in {name}, got {array.dtype.name}; use a plain T5'
            )
        self._opened[name] = array
        return array

    def _damaged(self, name: str, error: Exception) -> str:
        return f'{self.folder}: expected {name} whole, got {shortly(error)}; copy the checkpoint again'


def shortly(error: Exception) -> str:
    """The error's text in some 200 characters: TensorStore has the place at its beginning, the cause at its end."""
    text = ' '.join(str(error).split())
    text = text.partition(' [tensorstore_spec=')[0].partition(' See full TensorStore details')[0]
    if len(text) > 200:
        text = f'{text[:80]} ... {text[-110:]}'
    return f'{type(error).__name__}: {text}' if text else type(error).__name__
