"""The table of GPUs holds together by its own arithmetic, is found by name, and is near what others measured."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
import yaml

from nugnn.planning.datasheet import (
    DeviceSheet,
    SheetError,
    markdown_table,
    measured_over_sheet,
    read_sheets,
    sheet_of,
    sheets,
)
from nugnn.planning.profiles import DeviceProfile, read_profile

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/hardware.md"

CARDS = pytest.mark.parametrize("card", sheets(), ids=lambda card: card.name)

# Seconds of one SpMM and one product, hard-coded in CaPGNN (Neurocomputing 2026) as what its authors measured.
CAPGNN = {
    "RTX 3090": (0.107, 0.139),
    "A40": (0.120, 0.142),
    "RTX 3060": (0.195, 0.34),
    "RTX 2060 SUPER": (0.294, 0.50),
    "GTX 1660 Ti": (0.34, 0.99),
}
# TFLOP/s of large products that github.com/fanghostt/transformers-benchmarks publishes.
PUBLISHED = {
    "A100 80GB": {"tf32": 116, "fp16": 230},
    "RTX A6000": {"tf32": 60, "fp16": 95},
    "V100": {"fp32": 14, "fp16": 95},
}


@CARDS
def test_peaks_are_ordered_by_width(card: DeviceSheet) -> None:
    ordered = [card.tflops[form] for form in ("fp8", "fp16", "tf32", "fp32", "fp64") if form in card.tflops]
    assert ordered == sorted(ordered, reverse=True)
    assert card.tflops.get("bf16", 0) <= card.tflops["fp16"]


@CARDS
def test_float32_is_multiprocessors_times_clock(card: DeviceSheet) -> None:
    peak = card.multiprocessors * card.units.fp32_per_clock * card.boost_mhz / 1e6
    assert card.tflops["fp32"] == pytest.approx(peak, rel=0.01)


@CARDS
def test_half_the_width_is_twice_the_rate(card: DeviceSheet) -> None:
    for wide, narrow in (("tf32", "fp16"), ("fp16", "fp8")):
        if wide in card.tflops and narrow in card.tflops:
            assert card.tflops[narrow] / card.tflops[wide] == pytest.approx(2, rel=0.03)


@CARDS
def test_memory_is_read_in_10_to_100_milliseconds(card: DeviceSheet) -> None:
    assert 0.010 < card.memory_gib * 2**30 / (card.memory_gb_per_s * 1e9) < 0.100


@CARDS
def test_formats_follow_the_architecture(card: DeviceSheet) -> None:
    early = card.architecture in ("pascal", "volta", "turing")
    assert ("bf16" in card.tflops) != early
    assert ("tf32" in card.tflops) == (not early and card.architecture not in ("cdna1", "cdna2"))
    assert ("fp8" in card.tflops) == (card.architecture in ("ada", "hopper", "blackwell", "blackwell_rtx", "cdna3"))


@CARDS
def test_a_profile_of_the_sheet_keeps_below_it(card: DeviceSheet) -> None:
    profile = card.as_profile()
    assert DeviceProfile.model_validate_json(profile.model_dump_json()) == profile
    assert profile.source == "sheet" and profile.gemm_flops.keys() == card.tflops.keys()
    assert all(flops < card.tflops[form] * 1e12 for form, flops in profile.gemm_flops.items())
    assert profile.pack_bytes < profile.stream_bytes < card.memory_gb_per_s * 1e9
    assert profile.pack_bytes < profile.gather_bytes < card.memory_gb_per_s * 1e9
    assert profile.gather_bytes < profile.cached_gather_bytes
    assert card.host_link().bytes_per_second < (card.fabric_gb_per_s or math.inf) * 1e9


def test_the_table_is_large_and_its_names_are_unique() -> None:
    names = [name for card in sheets() for name in (card.name, *card.aliases)]
    assert len(sheets()) >= 30 and len(names) == len(set(names))
    for card in sheets():
        assert sheet_of(card.name) is card
        assert all(sheet_of(alias) is card and sheet_of(alias.lower() + " ") is card for alias in card.aliases)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("nvidia_h200", "NVIDIA H200"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("a100 sxm4 80gb", "NVIDIA A100-SXM4-80GB"),
        ("MI300X", "AMD Instinct MI300X"),
        ("RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
    ],
)
def test_a_card_is_found_by_any_of_its_names(name: str, found: str) -> None:
    assert sheet_of(name).name == found


def test_a_name_that_is_not_there_is_refused_with_those_near_it() -> None:
    with pytest.raises(
        SheetError, match=r"no data sheet of 'RTX 4095'; near it: NVIDIA GeForce RTX 4090, .*hardware.md"
    ):
        sheet_of("RTX 4095")
    with pytest.raises(SheetError, match=r"no data sheet of 'RTX 6000'; near it: .*Quadro RTX 6000"):
        sheet_of("RTX 6000")
    with pytest.raises(SheetError, match=r"no data sheet of 'abacus'\. docs/hardware.md"):
        sheet_of("abacus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boost_mhz": -1}, "of NVIDIA H200: boost_mhz is -1, must be above 0"),
        ({"colour": "green"}, "of NVIDIA H200: unknown field 'colour'; known: "),
        ({"architecture": "tesseract"}, "of NVIDIA H200: there is no 'tesseract'"),
        ({"sources": ["hearsay"]}, "of NVIDIA H200: there is no 'hearsay'"),
        ({"sources": []}, "of NVIDIA H200: sources is empty: give one source at least"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(change: dict[str, object], message: str) -> None:
    table = yaml.safe_load((ROOT / "planning/datasheet.yaml").read_text())
    table["gpus"] = [next(row for row in table["gpus"] if row["name"] == "NVIDIA H200") | change]
    with pytest.raises(SheetError, match=message):
        read_sheets(yaml.safe_dump(table))


def test_the_sheet_of_an_h200_is_near_what_was_measured_on_one() -> None:
    paper = sheet_of("NVIDIA H200").as_profile()
    measured = paper.model_copy(
        update={"stream_bytes": 4.22e12, "cached_gather_bytes": 9.74e12, "gemm_flops": {"bf16": 7.2e14}}
    )
    ratios = measured_over_sheet(measured, paper)
    assert ratios["stream_bytes"] == pytest.approx(1, abs=0.02)
    assert ratios["cached_gather_bytes"] == pytest.approx(1, abs=0.12)
    assert ratios["gemm_flops.bf16"] == pytest.approx(1, abs=0.10)
    assert "gemm_flops.fp8" not in ratios and ratios["pack_bytes"] == 1


def test_the_tables_are_package_data() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert "*.yaml" in tomllib.load(file)["tool"]["setuptools"]["package-data"]["nugnn.planning"]


def capgnn_rows() -> list[tuple[str, float, float, float, float]]:
    """Card; seconds of SpMM and product beside an RTX 3090, measured and by the sheet: m, s, m, s."""
    base_spmm, base_product = CAPGNN["RTX 3090"]
    base = sheet_of("RTX 3090").as_profile()
    rows = []
    for name, (spmm, product) in CAPGNN.items():
        sheet = sheet_of(name).as_profile()
        by_bytes = base.gather_bytes / sheet.gather_bytes
        by_flops = base.gemm_flops["fp32"] / sheet.gemm_flops["fp32"]
        rows.append((name, spmm / base_spmm, by_bytes, product / base_product, by_flops))
    return rows


def test_ratios_between_cards_are_near_those_of_capgnn() -> None:
    rows = capgnn_rows()
    spmm_errors = [abs(math.log(sheet / measured)) for _, measured, sheet, _, _ in rows[1:]]
    product_errors = [abs(math.log(sheet / measured)) for _, _, _, measured, sheet in rows[1:]]
    assert max(spmm_errors) < math.log(1.45) and sum(spmm_errors) / 4 < math.log(1.25)
    assert max(product_errors) < math.log(1.40) and sum(product_errors) / 4 < math.log(1.20)
    # One number for both kinds of work would be worse: SpMM follows bandwidth, products follow FLOP/s.
    crossed_spmm = [abs(math.log(flops / measured)) for _, measured, _, _, flops in rows[1:]]
    crossed_product = [abs(math.log(gather / measured)) for _, _, gather, measured, _ in rows[1:]]
    assert sum(crossed_spmm) > 1.5 * sum(spmm_errors) and sum(crossed_product) > 1.5 * sum(product_errors)


def test_products_are_near_those_that_others_published() -> None:
    for name, published in PUBLISHED.items():
        flops = sheet_of(name).as_profile().gemm_flops
        for form, measured in published.items():
            assert flops[form] / 1e12 == pytest.approx(measured, rel=0.2), (name, form)


def test_the_page_shows_the_table_and_the_errors() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert markdown_table() in page, "write datasheet.markdown_table() into docs/hardware.md again"
    for name, spmm, by_bytes, product, by_flops in capgnn_rows():
        row = f"| {name} | {spmm:.2f} | {by_bytes:.2f} | {product:.2f} | {by_flops:.2f} |"
        assert row in page, row


def test_the_sheet_of_an_h200_is_near_the_one_that_was_measured() -> None:
    measured = read_profile(ROOT / "benchmarks/rows/profiles/h200.json").devices[0]
    sheet = sheet_of("H200").as_profile()
    assert sheet.gemm_flops.keys() == measured.gemm_flops.keys()
    pairs = [(flops, measured.gemm_flops[form]) for form, flops in sheet.gemm_flops.items()]
    rates = ("stream_bytes", "gather_bytes", "cached_gather_bytes", "pack_bytes", "launch_seconds")
    pairs += [(getattr(sheet, rate), getattr(measured, rate)) for rate in rates]
    # one fraction for all cards, of which the published ones lie on the other side of fp32 and tf32
    assert all(told == pytest.approx(found, rel=0.08) for told, found in pairs)
