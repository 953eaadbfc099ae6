"""CPUs are recognised by what their kernels say, within what a process may use, and every assumption is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nugnn.planning.cpu_rule import CpuSheet, cpu_markdown_table, cpu_sheet, families, flops_per_clock, read_cpu_sheet
from nugnn.planning.named_cpu import named_cpu
from nugnn.planning.profiles import DeviceProfile

PAGE = Path(__file__).resolve().parents[2] / "docs/hardware.md"


def x86(
    vendor: str, family: int, model: int, name: str, flags: str, core: tuple[int, int], mhz: float, number: int
) -> str:
    socket, core_id = core
    return (
        f"processor\t: {number}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: {name}\n"
        f"cpu MHz\t\t: {mhz}\nphysical id\t: {socket}\ncore id\t\t: {core_id}\nflags\t\t: fpu sse2 {flags}\n"
    )


def machine(root: Path, cpuinfo: str, **files: str) -> Path:
    """The files of a machine below ``root``; a name's ``__`` is a slash."""
    texts = {"proc__cpuinfo": cpuinfo, "proc__meminfo": "MemTotal:       65536000 kB\nMemFree: 1 kB\n", **files}
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sapphire(root: Path) -> Path:
    """Two sockets of two cores of two threads each."""
    flags = "avx avx2 fma avx512f avx512_bf16 amx_tile amx_bf16"
    blocks = [
        x86(
            "GenuineIntel",
            6,
            143,
            "Intel(R) Xeon(R) Platinum 8480+ @ 2.00GHz",
            flags,
            (cpu // 2 % 2, cpu % 2),
            3100,
            cpu,
        )
        for cpu in range(8)
    ]
    cache = {
        f"sys__devices__system__cpu__cpu{cpu}__cache__index3__{what}": text
        for cpu in range(8)
        for what, text in (("level", "3"), ("size", "107520K"), ("shared_cpu_list", f"socket {cpu // 2 % 2}"))
    }
    return machine(root, "\n".join(blocks), **cache)


def test_a_server_of_two_sockets(tmp_path: Path) -> None:
    sheet = read_cpu_sheet(sapphire(tmp_path), range(8))
    assert (sheet.threads, sheet.cores, sheet.sockets, sheet.clock_hz) == (8, 4, 2, 2.0e9)
    assert sheet.flops == {"fp64": 4 * 2e9 * 32, "fp32": 4 * 2e9 * 64, "bf16": 4 * 2e9 * 1024}
    assert sheet.bandwidth_bytes == 2 * 8 * 4800e6 * 8
    assert sheet.cache_bytes == 2 * 105 << 20 and sheet.memory_bytes == 65536000 * 1024
    assert len(sheet.assumed) == 1 and "8 channels of 4800 MT/s" in sheet.assumed[0]


def test_only_what_the_process_may_use_counts(tmp_path: Path) -> None:
    sheet = read_cpu_sheet(sapphire(tmp_path), {0, 4})
    assert (sheet.threads, sheet.cores, sheet.sockets) == (2, 1, 1)
    assert sheet.cache_bytes == 105 << 20
    machine(
        tmp_path, (tmp_path / "proc/cpuinfo").read_text(), sys__fs__cgroup__cpu__max="", sys__fs__cgroup__memory__max=""
    )
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("200000 100000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{4 << 30}\n")
    sheet = read_cpu_sheet(tmp_path, range(8))
    assert (sheet.threads, sheet.cores, sheet.memory_bytes) == (2, 1, 4 << 30)
    assert any("quota of 2 of 8" in text for text in sheet.assumed) and any("4.0 GiB" in text for text in sheet.assumed)


def test_a_virtual_machine_of_few_cores_does_not_fill_the_channels(tmp_path: Path) -> None:
    blocks = [
        x86("AuthenticAMD", 25, 1, "AMD EPYC", "avx avx2 fma hypervisor", (0, cpu), 2445.4, cpu) for cpu in range(2)
    ]
    sheet = read_cpu_sheet(machine(tmp_path, "\n".join(blocks)), {0, 1})
    assert sheet.family.title == "EPYC Zen 3" and sheet.flops["fp32"] == pytest.approx(2 * 2.4454e9 * 32)
    assert sheet.as_profile().stream_bytes == 12e9 < sheet.bandwidth_bytes
    assert any("virtual machine" in text for text in sheet.assumed)
    assert any("last-level cache" in text for text in sheet.assumed) and any(
        "2445 MHz" in text for text in sheet.assumed
    )


def test_zen_4_does_512_bits_in_halves_and_hidden_instructions_do_not_count(tmp_path: Path) -> None:
    zen_4 = next(family for family in families() if family.title == "EPYC Zen 4")
    xeon = next(family for family in families() if family.title == "Xeon Ice Lake-SP")
    assert flops_per_clock({"sse2", "avx", "avx2", "avx512f", "avx512_bf16"}, zen_4) == {
        "fp64": 16,
        "fp32": 32,
        "bf16": 64,
    }
    assert flops_per_clock({"sse2", "avx", "avx2", "avx512f"}, xeon)["fp32"] == 64
    assert flops_per_clock({"sse2", "avx", "avx2"}, xeon)["fp32"] == 32
    assert flops_per_clock({"sse2"}, xeon)["fp32"] == 8


def test_arm_has_no_model_name_and_says_little(tmp_path: Path) -> None:
    block = "processor\t: {}\nFeatures\t: fp asimd sve bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    sheet = read_cpu_sheet(machine(tmp_path, "\n".join(block.format(cpu) for cpu in range(4))), range(4))
    assert sheet.name == "Neoverse V1 (Graviton 3)" and (sheet.cores, sheet.sockets) == (4, 1)
    assert sheet.flops == {"fp64": 4 * 2.6e9 * 16, "fp32": 4 * 2.6e9 * 32, "bf16": 4 * 2.6e9 * 64}
    assert any("a clock of 2.6 GHz" in text for text in sheet.assumed) and any(
        "a core for each" in text for text in sheet.assumed
    )


def test_the_kernels_clock_is_read_where_the_name_has_none(tmp_path: Path) -> None:
    block = x86("AuthenticAMD", 26, 2, "AMD EPYC 9755 128-Core Processor", "avx avx2 fma avx512f", (0, 0), 1500, 0)
    root = machine(tmp_path, block, sys__devices__system__cpu__cpu0__cpufreq__cpuinfo_max_freq="4121000\n")
    assert read_cpu_sheet(root, {0}).clock_hz == 4.121e9
    (root / "sys/devices/system/cpu/cpu0/cpufreq/base_frequency").write_text("2700000\n")
    assert read_cpu_sheet(root, {0}).clock_hz == 2.7e9


def test_an_unknown_machine_and_one_without_proc_get_a_sheet(tmp_path: Path) -> None:
    block = x86("GenuineIntel", 6, 9999, "a CPU", "avx avx2 fma", (0, 0), 2000, 0)
    sheet = read_cpu_sheet(machine(tmp_path / "new", block), {0})
    assert any("not in the table" in text for text in sheet.assumed) and sheet.flops["fp32"] == 2e9 * 32
    bare = read_cpu_sheet(tmp_path / "none", {0, 1})
    assert bare.threads == 2 and any("/proc/cpuinfo says nothing" in text for text in bare.assumed)
    profile_keeps(bare)


def test_fewer_threads_do_as_much_as_their_cores(tmp_path: Path) -> None:
    sheet = read_cpu_sheet(sapphire(tmp_path), range(8))
    all_of_it, one = sheet.as_profile(), sheet.as_profile(1)
    assert one.multiprocessors == 1 and sheet.as_profile(10**6) == all_of_it
    for name, rate in one.gemm_flops.items():
        assert rate == pytest.approx(all_of_it.gemm_flops[name] / sheet.cores)
    assert one.cached_gather_bytes == pytest.approx(all_of_it.cached_gather_bytes / sheet.cores)
    assert one.memory_bytes == all_of_it.memory_bytes == sheet.memory_bytes


def test_this_machine_has_a_sheet() -> None:
    sheet = cpu_sheet()
    assert 1 <= sheet.threads <= (os.cpu_count() or 1) and sheet.assumed
    profile_keeps(sheet)


def profile_keeps(sheet: CpuSheet) -> None:
    profile = sheet.as_profile()
    assert DeviceProfile.model_validate_json(profile.model_dump_json()) == profile
    assert (profile.kind, profile.source, profile.multiprocessors) == ("cpu", "sheet", sheet.threads)
    assert profile.pack_bytes < profile.gather_bytes < profile.stream_bytes <= sheet.bandwidth_bytes
    assert profile.gemm_flops["fp64"] < profile.gemm_flops["fp32"] < sheet.flops["fp32"]


def test_families_have_sources_and_do_not_overlap() -> None:
    known = [(family.vendor, family.family, model) for family in families() for model in family.models]
    known += [(None, family.implementer, part) for family in families() for part in family.parts]
    assert len(known) == len(set(known))
    assert all(family.source.startswith("https://") for family in families())


def test_the_page_shows_the_families() -> None:
    assert cpu_markdown_table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("epyc zen 4", "EPYC Zen 4"),
        ("AMD EPYC 7742 64-Core Processor", "EPYC Zen 2"),
        ("EPYC 7763", "EPYC Zen 3"),
        ("EPYC 9684X", "EPYC Zen 4"),
        ("EPYC 9575F", "EPYC Zen 5"),
        ("Intel(R) Xeon(R) Gold 6248R CPU @ 3.00GHz", "Xeon Skylake-SP or Cascade Lake"),
        ("Xeon Gold 6338", "Xeon Ice Lake-SP"),
        ("Xeon Platinum 8480+", "Xeon Sapphire Rapids"),
        ("Xeon Platinum 8592+", "Xeon Emerald Rapids"),
        ("Graviton 3", "Neoverse V1 (Graviton 3)"),
        ("Neoverse V2 (Graviton 4)", "Neoverse V2 (Graviton 4)"),
        ("Xeon Platinum 8380HL", None),  # Cooper Lake, which is in no row
        ("EPYC", None),
        ("Ryzen 5 7520U", None),  # its numbers do not say its cores' generation
    ],
)
def test_names_tell_families(name: str, title: str | None) -> None:
    sheet = named_cpu(name)
    assert (None if sheet is None else sheet.family.title) == title


def test_each_family_is_known_by_its_title_and_no_other_by_the_same() -> None:
    for family in families():
        sheet = named_cpu(family.title)
        assert sheet is not None and sheet.family == family and sheet.cores == family.cores
        assert sheet.flops["fp32"] == pytest.approx(family.cores * family.ghz * 1e9 * family.fma_bits / 16)
