"""TPU chips that programs can be compiled for without the hardware.

Source of capacities and rates: Google Cloud's TPU documentation. The clock follows from the peak rate and the
multiply-adds per cycle of all matrix units.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip, as one JAX device.

    Attributes:
      name: its common name.
      hbm: bytes of high-bandwidth memory.
      bandwidth: of that memory, bytes/s.
      clock: Hz, of the cycles that the compiler estimates.
      layouts: topology name and chips per host by axis, by number of chips.
      options: further arguments of `get_topology_desc`.
    """

    name: str
    hbm: float
    bandwidth: float
    clock: float
    layouts: dict[int, tuple[str, tuple[int, int, int]]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_GIB = 2.0**30
_CUBE = {1: ('2x2x1', (2, 2, 1)), 2: ('2x2x1', (2, 2, 1)), 4: ('2x2x1', (2, 2, 1)), 8: ('2x2x2', (2, 2, 1))}
_FLAT = {1: ('1x1', (1, 1, 1)), 4: ('2x2', (2, 2, 1)), 8: ('2x4', (2, 4, 1))}
_MEGACORE = dict(chip_config_name='megacore')  # the two cores of a chip are one device
CHIPS = {
    'v4': Chip('TPU v4', 32 * _GIB, 1.2e12, 1.05e9, _CUBE, _MEGACORE),
    'v5e': Chip('TPU v5e', 16 * _GIB, 8.19e11, 1.5e9, _FLAT),
    'v5p': Chip('TPU v5p', 95 * _GIB, 2.765e12, 1.75e9, _CUBE, _MEGACORE),
    'v6e': Chip('TPU v6e', 32 * _GIB, 1.64e12, 1.75e9, _FLAT),
}


def named(topology: str) -> tuple[Chip, int]:
    """The chip and the number of chips of `NAME` or `NAME:CHIPS`, such as v4 or v5e:8.

    Raises:
      ValueError: there is no such chip, or no such number of them.
    """
    name, _, number = topology.partition(':')
    if name not in CHIPS:
        raise ValueError(f'topology: expected one of {", ".join(CHIPS)}, or NAME:CHIPS; got {topology!r}')
    chip, chips = CHIPS[name], int(number or 1) if re.fullmatch(r'\d*', number) else 0
    if chips not in chip.layouts:
        known = ', '.join(map(str, chip.layouts))
        raise ValueError(f'topology: expected {known} chips of {name}, got {number!r}')
    return chip, chips


def devices(topology: str) -> list:
    """The devices of `named(topology)`, to compile for; needs libtpu, and no TPU.

    Raises:
      OSError: there is no libtpu, or another process has it.
    """
    from jax.experimental import topologies  # experimental: imported only here

    chip, chips = named(topology)
    layout, host = chip.layouts[chips]
    name = f'{topology.partition(":")[0]}:{layout}'
    try:
        description = topologies.get_topology_desc(
            platform='tpu', topology_name=name, chips_per_host_bounds=host, **chip.options
        )
    except Exception as error:  # the plugin raises many kinds
        raise OSError(
            f'expected libtpu to compile for a {chip.name}, got {" ".join(str(error).split())[:200]}; see that '
            'requirements-tpu-report.txt is installed and that no other process uses libtpu'
        ) from error
    return list(description.devices[:chips])
