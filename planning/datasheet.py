"""GPUs by name from what their vendors print: profiles for hardware that nobody here has.

The table is ``datasheet.yaml``. A sheet promises peaks; :meth:`DeviceSheet.as_profile` multiplies them by what devices
were seen to sustain (:mod:`nugnn.planning.derates`). ``docs/hardware.md`` shows the table and how far sheets are off.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nugnn.planning import derates
from nugnn.planning.cpu_rule import CpuSheet, cpu_sheet
from nugnn.planning.profiles import Count, DeviceProfile, Format, LinkProfile, Positive
from nugnn.planning.validation import what_is_wrong

__all__ = ["CpuSheet", "DeviceSheet", "cpu_sheet", "markdown_table", "measured_over_sheet", "sheet_of", "sheets"]

_SAID_OR_NOT = re.compile(r"\b(nvidia|amd|tesla|geforce|instinct|gpu|generation)\b")
"""Words of a name that people leave out. Not Quadro: an RTX 6000 may be of two architectures."""


class SheetError(ValueError):
    """There is no such card in the table, or the table is wrong."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Record):
    """A vendor's document."""

    title: str = Field(min_length=3)
    url: str = Field(pattern=r"^https?://\S+$")


class Architecture(_Record):
    """What all cards of an architecture share.

    Args:
        fp32_per_clock: Operations of one multiprocessor in a clock.
        cached_per_clock: Bytes of one multiprocessor in a clock that a gather from the last shared cache sustains.
        basis: Where the latter comes from.
    """

    fp32_per_clock: Count
    cached_per_clock: Positive
    basis: str


class Pcie(_Record):
    """The slot that the card is made for."""

    generation: Literal[3, 4, 5, 6]
    lanes: Literal[4, 8, 16]


class DeviceSheet(_Record):
    """What a vendor prints about a GPU, in the units of data sheets.

    Args:
        name: As ``torch.cuda.get_device_name`` reports it.
        aliases: Other names, of other drivers and of people.
        vendor: Who makes it.
        architecture: Of its multiprocessors.
        memory_gib: Size of the memory.
        memory_gb_per_s: Bandwidth of the memory, GB a second.
        cache_mib: The last cache that all multiprocessors share.
        multiprocessors: AMD's compute units.
        boost_mhz: The clock that the vendor's peak in float32 belongs to.
        tflops: Dense products by format, sums in float32.
        fabric_gb_per_s: NVLink or Infinity Fabric, one way, all links together; None without.
        pcie: The slot.
        sources: Where the figures come from.
        checked: Bandwidth and the main products agreed with public pages that repeat the vendor's figures.
        note: What a reader has to know.
    """

    name: str
    aliases: tuple[str, ...] = ()
    vendor: Literal["NVIDIA", "AMD"]
    architecture: str
    memory_gib: Positive
    memory_gb_per_s: Positive
    cache_mib: Positive
    multiprocessors: Count
    boost_mhz: Positive
    tflops: dict[Format, Positive] = Field(min_length=1)
    fabric_gb_per_s: Positive | None = None
    pcie: Pcie
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    checked: bool
    note: str | None = None
    units: Architecture
    """The architecture's own figures."""

    def as_profile(self) -> DeviceProfile:
        """What the card sustains, estimated: every peak times its derate."""
        bandwidth = self.memory_gb_per_s * 1e9
        in_cache = self.multiprocessors * self.boost_mhz * 1e6 * self.units.cached_per_clock
        return DeviceProfile(
            name=self.name,
            kind="cuda",
            source="sheet",
            memory_bytes=round(self.memory_gib * 2**30 * derates.GPU_MEMORY),
            cache_bytes=round(self.cache_mib * 2**20),
            gemm_flops={form: peak * 1e12 * derates.GPU_PRODUCT[form] for form, peak in self.tflops.items()},
            stream_bytes=bandwidth * derates.GPU_STREAM,
            gather_bytes=bandwidth * derates.GPU_GATHER,
            cached_gather_bytes=in_cache,
            pack_bytes=bandwidth * derates.GPU_PACK,
            launch_seconds=derates.GPU_LAUNCH_SECONDS,
            multiprocessors=self.multiprocessors,
        )

    def host_link(self) -> LinkProfile:
        """To the host's memory, through a slot that is as good as the card; 0.8 of it arrives."""
        one_way = derates.PCIE_BYTES_PER_LANE[self.pcie.generation] * self.pcie.lanes
        return LinkProfile(between="host", via="sheet", bytes_per_second=0.8 * one_way, latency_seconds=1e-5)


def sheet_of(name: str) -> DeviceSheet:
    """The sheet of a card by its name: exactly as written, or without case, vendor, brand and punctuation.

    Raises:
        SheetError: There is none; names that come near are given.

    >>> sheet_of("NVIDIA A100-SXM4-40GB").tflops["bf16"]
    312.0
    >>> sheet_of("rtx4090").name
    'NVIDIA GeForce RTX 4090'
    """
    exact, normal = _by_name()
    found = exact.get(name) or normal.get(_normalised(name))
    if found:
        return found
    wanted = _normalised(name)
    longer = [key for key in normal if wanted and wanted in key]
    near = longer + difflib.get_close_matches(wanted, normal, n=4, cutoff=0.5)
    names = list(dict.fromkeys(normal[key].name for key in near))[:5]
    hint = f"; near it: {', '.join(names)}" if names else ""
    raise SheetError(
        f"no data sheet of {name!r}{hint}. docs/hardware.md lists all GPUs and families of CPUs, and tells how to add "
        "one"
    )


@lru_cache(maxsize=1)
def sheets() -> tuple[DeviceSheet, ...]:
    """All cards, in the order of the file.

    Raises:
        SheetError: The file is wrong: says in which card and field.
    """
    return read_sheets((resources.files("nugnn.planning") / "datasheet.yaml").read_text(encoding="utf-8"))


def read_sheets(text: str) -> tuple[DeviceSheet, ...]:
    """The cards of a YAML text laid out as ``datasheet.yaml``.

    Raises:
        SheetError: It is wrong: says in which card and field.
    """
    loaded: dict[str, Any] = yaml.safe_load(text)
    sources, architectures = loaded["sources"], loaded["architectures"]
    cards = []
    for row in loaded["gpus"]:
        try:
            titles = tuple(sources[key] for key in row["sources"])
            units = architectures[row["architecture"]]
            cards.append(DeviceSheet.model_validate({**row, "sources": titles, "units": units}))
        except KeyError as error:
            raise SheetError(f"data sheet of {row.get('name')}: there is no {error.args[0]!r}") from error
        except ValidationError as error:
            raise SheetError(f"data sheet of {row.get('name')}: {what_is_wrong(error, DeviceSheet)}") from error
    return tuple(cards)


def measured_over_sheet(measured: DeviceProfile, sheet: DeviceProfile) -> dict[str, float]:
    """By field and format, the measured value divided by the sheet's; formats that only one has are left out."""
    rates = ("memory_bytes", "cache_bytes", "stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes")
    ratios = {field: getattr(measured, field) / getattr(sheet, field) for field in rates}
    common = measured.gemm_flops.keys() & sheet.gemm_flops.keys()
    products = {
        f"gemm_flops.{form}": measured.gemm_flops[form] / flops
        for form, flops in sheet.gemm_flops.items()
        if form in common
    }
    return ratios | products


def markdown_table() -> str:
    """All cards as the table of ``docs/hardware.md``: the vendor's figures, and whether they were checked."""
    lines = [
        "| card | GiB | GB/s | cache, MiB | MPs | fp32 | tf32 | bf16 | fp16 | fp8 | fabric, GB/s | checked | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for card in sheets():
        products = " | ".join(_figure(card.tflops, form) for form in ("fp32", "tf32", "bf16", "fp16", "fp8"))
        links = ", ".join(f"[{source.title}]({source.url})" for source in card.sources)
        fabric = f"{card.fabric_gb_per_s:g}" if card.fabric_gb_per_s else "-"
        name = f"{card.name} ({card.note})" if card.note else card.name
        lines.append(
            f"| {name} | {card.memory_gib:g} | {card.memory_gb_per_s:g} | {card.cache_mib:g} | "
            f"{card.multiprocessors} | {products} | {fabric} | {'yes' if card.checked else 'no'} | {links} |"
        )
    return "\n".join(lines) + "\n"


def _figure(tflops: Mapping[Format, float], form: Format) -> str:
    return f"{tflops[form]:g}" if form in tflops else "-"


def _normalised(name: str) -> str:
    """Without case, vendor, brand and punctuation, so that ``rtx4090`` finds ``NVIDIA GeForce RTX 4090``."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return _SAID_OR_NOT.sub("", words).replace(" ", "")


@lru_cache(maxsize=1)
def _by_name() -> tuple[dict[str, DeviceSheet], dict[str, DeviceSheet]]:
    """Cards by their names and aliases, as written and normalised."""
    named = [(name, card) for card in sheets() for name in (card.name, *card.aliases)]
    return dict(named), {_normalised(name): card for name, card in named}
