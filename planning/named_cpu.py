"""CPUs that are known by their names alone: the rule of `nugnn.planning.cpu_rule` by what their family has."""

from __future__ import annotations

import difflib
import re

from nugnn._counted import counted
from nugnn.planning.cpu_rule import CpuFamily, CpuSheet, families, flops_per_clock

_LEFT_OUT = re.compile(r"\((r|tm)\)|\b(amd|intel|aws|arm|processor|cpu|\d+-core)\b|@.*")
"""In names that systems and people write."""
_ALL_UNITS = ("avx512f", "sve")
"""Flags with which the family's own units bound what a core does."""
_GIB_OF_A_CHANNEL = 16


def named_cpu(name: str, cores: int | None = None) -> CpuSheet | None:
    """The CPUs of a host, whole: one thread for each core, products in 16 bits as in 32, which no name tells.

    Args:
        name: Of a family in ``docs/hardware.md``, or of a product that its maker's numbers put into one.
        cores: Of all sockets together; as many as one socket of the family has at most when None.

    Returns:
        None where the name is of no family.

    >>> sheet = named_cpu("AMD EPYC 9654 96-Core Processor", cores=192)
    >>> sheet.family.title, sheet.sockets, sheet.bandwidth_bytes
    ('EPYC Zen 4', 2, 921600000000.0)
    >>> named_cpu("EPYC 9999") is None
    True
    """
    family = _family_of(name)
    if family is None:
        return None
    own = family.cores if cores is None else cores
    sockets = -(-own // family.cores)
    hertz, channels = family.ghz * 1e9, sockets * family.channels
    note = f" ({family.note})" if family.note else ""
    assumed = [
        f"{family.ghz:g} GHz, {counted(family.channels, 'channel')} a socket{note}",
        "no faster products in 16 bits",
    ]
    if cores is None:
        assumed.append(f"{counted(own, 'core')}, as many as {family.title} has in a socket at most (cores)")
    return CpuSheet(
        name=name,
        family=family,
        threads=own,
        cores=own,
        sockets=sockets,
        clock_hz=hertz,
        flops={form: own * hertz * per_clock for form, per_clock in flops_per_clock(_ALL_UNITS, family).items()},
        bandwidth_bytes=channels * family.mega_transfers * 1e6 * 8,
        memory_bytes=channels * _GIB_OF_A_CHANNEL << 30,
        cache_bytes=round(own * family.l3_mib_per_core * 2**20),
        assumed=tuple(assumed),
    )


def near_cpus(name: str) -> list[str]:
    """Families whose names are like ``name``.

    >>> near_cpus("EPYC Zen 6")[0]
    'EPYC Zen 5'
    """
    titles = {_plain(family.title): family.title for family in families()}
    return [titles[each] for each in difflib.get_close_matches(_plain(name), titles, n=3, cutoff=0.6)]


def _family_of(name: str) -> CpuFamily | None:
    plain = _plain(name)
    for family in families():
        if plain == _plain(family.title) or (family.products and re.fullmatch(family.products, plain)):
            return family
    return None


def _plain(name: str) -> str:
    return " ".join(_LEFT_OUT.sub(" ", name.lower()).split())
