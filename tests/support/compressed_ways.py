"""Ways for gradients under DistributedDataParallel that are trained for 200 steps, on CPUs and between GPUs."""

WAYS: tuple[int | str, ...] = ("bf16", "fp16", 8, 7, 6, 5, 4, 3, 2, 1, "adaptive", "powersgd")
"""As `nugnn.comm.compress` takes them; each runs with feedback and without, on uneven batches."""
