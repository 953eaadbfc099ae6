"""Built-in networks: what they read of an image or a text of any size, and what cannot be."""

from __future__ import annotations

import pytest
import torch

from nugnn.networks import CNN


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("sides", [(1, 1), (2, 3), (5, 8), (28, 31)])
@torch.no_grad()
def test_a_region_is_the_mean_of_its_pixels(regions: int, sides: tuple[int, int]) -> None:
    model = CNN(1, 4, widths=(2, 3), regions=regions).eval()
    x = torch.randn(2, 1, *sides)
    seen = model.features(x)
    means = torch.zeros(2, 3, regions, regions)
    for row in range(regions):
        for column in range(regions):
            part = seen
            for axis, number in ((2, row), (3, column)):
                size = -(-seen.shape[axis] // regions)
                part = part.narrow(axis, 0, min(part.shape[axis], (number + 1) * size))
                part = part.narrow(axis, first := min(part.shape[axis], number * size), part.shape[axis] - first)
            if part.numel():
                means[:, :, row, column] = part.mean((2, 3))
    # the same at most 64 numbers added up in another order: Higham 2002, sec. 4.2
    bound = 64 * torch.finfo(torch.float32).eps * float(seen.abs().max())
    assert (model._means(seen) - means).abs().max() <= bound
    assert model(x).shape == (2, 4)


def test_a_mirrored_image_is_another_one_to_two_regions_and_the_same_to_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 16, 16)
    one, two = (CNN(1, 2, widths=(4,), regions=regions).eval() for regions in (1, 2))
    for model, differs in ((one, False), (two, True)):
        kernel = model.features[0].weight
        kernel.data = (kernel + kernel.flip(3)) / 2  # kernels that a mirror does not change
        kernel = model.features[3].weight
        kernel.data = (kernel + kernel.flip(3)) / 2
        assert torch.allclose(model(x), model(x.flip(3)), atol=1e-5) is not differs


def test_regions_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="regions is 0, must be 1 or more"):
        CNN(1, 2, regions=0)
