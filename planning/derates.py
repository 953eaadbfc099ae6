"""What a device sustains of what its sheet promises: one fraction for each kind of work, with its origin.

The fractions for GPUs are ratios measured by this project on an H200 and an H100 (``docs/performance.md``,
``docs/performance-notes.md``) or published for other cards; ``docs/hardware.md`` tells how far they are off.
"""

from __future__ import annotations

from nugnn.planning.profiles import Format

GPU_PRODUCT: dict[Format, float] = {
    "fp64": 0.80,  # assumed
    "fp32": 0.85,  # V100 14 of 15.7 (published)
    "tf32": 0.75,  # A100 116 of 156, RTX A6000 60 of 77 (published)
    # H200 650 to 790 of 989 (reported, no row kept); A100 230 of 312, V100 95 of 125, RTX A6000 95 of 155 (published)
    "bf16": 0.73,
    "fp16": 0.73,
    "fp8": 0.65,  # assumed
    "int8": 0.65,  # assumed
}
"""Of the peak of large dense products. Published: github.com/fanghostt/transformers-benchmarks."""

GPU_STREAM = 0.88
"""Of the memory's bandwidth in a copy: 4.22 of 4.8 TB/s (H200), 2.99 of 3.35 (H100)."""

GPU_GATHER = 0.80
"""Of the memory's bandwidth in rows gathered: cuSPARSE, random order: 2.68 of 3.35 TB/s (H100), 4.08 of 4.8 (H200)."""

GPU_PACK = 0.75
"""Of the memory's bandwidth, read and written: 0.4 GB in 0.10 to 0.12 ms (H200), so 3.3 to 4 of 4.8 TB/s."""

GPU_MEMORY = 0.93
"""Of the memory for tensors: error correction in GDDR6 takes 1/16 (a T4 reports 15 of 16 GiB), the driver some more."""

GPU_LAUNCH_SECONDS = 5e-6
"""The host's part, so the card does not decide it: assumed."""

PCIE_BYTES_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One way, after line coding, by generation."""

CPU_PRODUCT = 0.75
"""Of the vector units' peak: assumed; a machine whose threads share cores with others does half of it."""

CPU_AMX_PRODUCT = 0.35
"""Of the matrix unit's peak in oneDNN's products: assumed, and the least certain figure here."""

CPU_STREAM = 0.80
"""Of the channels' bandwidth in a copy: assumed."""

CPU_CORE_BYTES = 12e9
"""Bytes a second that one core copies, read and written, whatever the channels: assumed; 8.4 GB/s beside other work."""

CPU_GATHER = 0.50
"""Of a copy's rate in rows gathered from memory: 8.5 of 16.8 GB/s on a virtual EPYC of two cores."""

CPU_PACK = 0.45
"""Of a copy's rate: 7.4 of 16.8 GB/s, the same machine."""

CPU_CACHED_BYTES_PER_CLOCK = 8.0
"""Bytes of one core in a clock gathered from the last cache: 5 (torch's kernel) to over 20 (ours, much in L2)."""

CPU_LAUNCH_SECONDS = 5e-6
"""One more small operator of torch: 6.4 microseconds on the same machine."""
