"""What a device sustains of what its sheet promises: one fraction for each kind of work, with its origin.

The fractions for GPUs are ratios measured by this project on an H200 and an H100 (``docs/performance.md``,
``docs/performance-notes.md``) or published for other cards; ``docs/hardware.md`` tells how far they are off.
"""

from __future__ import annotations

from nugnn.planning.profiles import Format

GPU_PRODUCT: dict[Format, float] = {
    "fp64": 0.90,  # H200 62 of 66.9
    "fp32": 0.82,  # H200 51.1 of 66.9; V100 14 of 15.7 (published)
    "tf32": 0.73,  # H200 348 of 494; A100 116 of 156, RTX A6000 60 of 77 (published)
    # H200 719 of 989; A100 230 of 312, V100 95 of 125, RTX A6000 95 of 155 (published)
    "bf16": 0.73,
    "fp16": 0.73,
    "fp8": 0.65,  # H200 1,300 of 1,979
    "int8": 0.47,  # H200 922 of 1,979
}
"""Of the peak of large dense products. Published: github.com/fanghostt/transformers-benchmarks."""

GPU_STREAM = 0.88
"""Of the memory's bandwidth in a copy: 4.22 of 4.8 TB/s (H200), 2.99 of 3.35 (H100)."""

GPU_GATHER = 0.95
"""Of the memory's bandwidth in rows gathered by our kernels at random: 4.57 of 4.8 TB/s (H200), 1/8 from its cache."""

GPU_PACK = 0.78
"""Of the memory's bandwidth, read and written: 3.75 of 4.8 TB/s (H200)."""

GPU_MEMORY = 0.93
"""Of the memory for tensors: error correction in GDDR6 takes 1/16 (a T4 reports 15 of 16 GiB); an H200 has 0.99."""

GPU_LAUNCH_SECONDS = 7e-6
"""The host's part, so the card does not decide it: 7.05 microseconds beside an H200 (a virtual Xeon)."""

PCIE_BYTES_PER_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One way, after line coding, by generation."""

CPU_PRODUCT = 0.75
"""Of the vector units' peak: assumed; a machine whose threads share cores with others does half of it."""

CPU_AMX_PRODUCT = 0.12
"""Of the matrix unit's peak in torch's products: 4.15 of 34.4 TFLOP/s, 16 threads of a virtual Xeon beside an H200."""

CPU_STREAM = 0.80
"""Of the channels' bandwidth in a copy: assumed."""

CPU_CORE_BYTES = 6e9
"""Bytes a second that one core copies, read and written, whatever the channels: 4.3 (one of 16 threads) to 8.4 GB/s."""

CPU_GATHER = 0.50
"""Of a copy's rate in rows gathered from memory: 8.5 of 16.8 GB/s on a virtual EPYC of two cores."""

CPU_PACK = 0.45
"""Of a copy's rate: 7.4 of 16.8 GB/s, the same machine."""

CPU_CACHED_BYTES_PER_CLOCK = 8.0
"""Bytes of one core in a clock gathered from the last cache: 5 (torch's kernel) to over 20 (ours, much in L2)."""

CPU_LAUNCH_SECONDS = 5e-6
"""One more small operator of torch: 6.4 microseconds on the same machine."""
