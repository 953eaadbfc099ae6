"""The list of torch functions that work on each sample by itself, by how many axes one sample has.

Row ``i`` of the result depends on row ``i`` of the operands alone, for every index of the axes in front of a sample's
own. `nugnn.kernels.row_rule_table` turns the list into rules; the law it states, that a batch gives what its parts give
put together, is tried on every name (``tests/kernels/test_per_sample.py``).
"""

from __future__ import annotations


def _names(text: str, axes: int, places: int = 0) -> dict[str, int]:
    """Names whose samples have as many ``axes``; ``NAME{}d`` stands for 1d, 2d, 3d, each with an axis more."""
    found: dict[str, int] = {}
    for name in text.split():
        found |= {name.format(d): axes + d for d in range(1, places + 1)} if "{}" in name else {name: axes}
    return found


SAMPLE_AXES: dict[str, int] = {
    # channels and places, without a batch axis too: (C, L), (C, H, W), (C, D, H, W)
    **_names("conv{}d conv_transpose{}d max_pool{}d avg_pool{}d lp_pool{}d", 1, 3),
    **_names("adaptive_avg_pool{}d adaptive_max_pool{}d", 1, 3),
    **_names("max_pool{}d_with_indices adaptive_max_pool{}d_with_indices", 1, 3),
    **_names("pixel_shuffle pixel_unshuffle", 3),
    "fold": 2,
    "linear": 1,
    "one_hot": 0,
    **_names("tril triu", 2),
}
"""Functions of one operand with samples; all others, such as weights, are the same for every sample."""

SAMPLE_AXES_OF_ALL: dict[str, int] = {
    **_names("bilinear gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell", 1),
    **_names("max_unpool{}d", 1, 3),
    "scaled_dot_product_attention": 2,
    "pairwise_distance": 1,
}
"""Functions that may have samples in several operands, of which each sample of the result sees its own in all."""

BATCH_AXES: dict[str, int] = {
    **_names("batch_norm group_norm cross_entropy nll_loss multi_margin_loss multilabel_margin_loss", 2),
    **_names("multilabel_soft_margin_loss cosine_embedding_loss triplet_margin_loss", 2),
    **_names("triplet_margin_with_distance_loss linear_cross_entropy", 2),
    **_names("interpolate instance_norm local_response_norm channel_shuffle native_channel_shuffle affine_grid", 3),
    "grid_sample": 4,
}
"""Functions whose axis 0 is the batch, whatever a sample has, with the fewest axes that a batch has."""
