"""Attention as one operator: the definition, gradients, dropout's mask, refusals; its Triton kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nugnn.kernels.attention import AttentionDropout, gat_attention, gatv2_attention
from nugnn.kernels.attention.reference import gat_attention_reference, gatv2_attention_reference
from nugnn.kernels.dropout import dropout_rows
from nugnn.kernels.philox import RandomKey
from nugnn.kernels.rows import IdRuns
from nugnn.kernels.structure import Structure

from .conftest import MakeStructure
from .triton_laws import run_checks

CHECKS = Path(__file__).with_name("attention_triton_checks.py")
KEY = RandomKey(3, 4, 5)
KINDS = {"gat": (gat_attention, gat_attention_reference), "gatv2": (gatv2_attention, gatv2_attention_reference)}


def inputs(structure: Structure, kind: str, heads: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(structure.num_src, heads, dim)]
    if kind == "gat":
        shapes += [(structure.num_src, heads), (structure.num_dst, heads)]
    else:
        shapes += [(structure.num_dst, heads, dim), (heads, dim)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_attention_in_the_interpreter() -> None:
    run_checks(CHECKS, "cpu")


@pytest.mark.gpu
def test_triton_attention_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_checks(CHECKS, "cuda")


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_equal_the_definition(make_structure: MakeStructure, kind: str, p: float) -> None:
    function, definition = KINDS[kind]
    structure = make_structure(5)
    ids = torch.arange(structure.num_edges) * 3 + 2**33
    given = inputs(structure, kind, 3, 4)
    out = function(structure, *given, 0.1, AttentionDropout(p, KEY, ids))
    exact = definition(structure, *given, 0.1, p, KEY, ids)
    # both in float64, in other orders: below a thousand roundings of values of some units
    assert torch.allclose(out, exact, rtol=1e-12, atol=1e-12)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for mine, right in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(exact, given, grad), strict=True):
        assert torch.allclose(mine, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(make_structure: MakeStructure, kind: str) -> None:
    structure = make_structure(12, num_dst=3, num_halo=2, max_degree=2)
    function, _ = KINDS[kind]
    dropout = AttentionDropout(0.3, KEY)
    assert torch.autograd.gradcheck(lambda *x: function(structure, *x, 0.2, dropout), inputs(structure, kind, 2, 3))


def test_the_mask_is_that_of_the_weights_alone(make_structure: MakeStructure) -> None:
    """Runs of ids stand for the ids they make, and the mask for that of dropping the (E, H, 1) weights."""
    structure = make_structure(7)
    runs = IdRuns(torch.arange(structure.num_dst) * 1000, structure.indptr)
    x, el, er = inputs(structure, "gat", 2, 3)
    by_runs = gat_attention(structure, x, el, er, 0.2, AttentionDropout(0.5, KEY, runs))
    assert torch.equal(by_runs, gat_attention(structure, x, el, er, 0.2, AttentionDropout(0.5, KEY, runs.tensor())))
    ones = torch.ones(structure.num_edges, 2, 1, dtype=torch.float64)
    mask = dropout_rows(ones, 0.5, KEY, runs.tensor())[..., 0]
    shares = gat_attention(structure, torch.ones_like(x), torch.zeros_like(el), torch.zeros_like(er), 0.2,
                           AttentionDropout(0.5, KEY, runs))[..., 0]  # fmt: skip
    kept = torch.zeros(structure.num_dst, 2, dtype=torch.float64).index_add(0, structure.dst.long(), mask)
    assert torch.allclose(shares, kept / structure.in_degrees.clamp(min=1)[:, None], rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_operands_of_two_types_meet_in_the_wider_one(make_structure: MakeStructure, kind: str) -> None:
    function, _ = KINDS[kind]
    structure = make_structure(4)
    x, *rest = (y.detach() for y in inputs(structure, kind, 2, 3, torch.float32))
    out = function(structure, x.bfloat16(), *rest)
    assert out.dtype == torch.float32
    assert torch.equal(out, function(structure, x.bfloat16().float(), *rest))


def test_wrong_arguments_are_refused(make_structure: MakeStructure) -> None:
    structure = make_structure(1)
    x, el, er = inputs(structure, "gat", 2, 3)
    _, feat_dst, attn = inputs(structure, "gatv2", 2, 3)
    runs = IdRuns(torch.zeros(1, dtype=torch.int64), torch.tensor([0, structure.num_edges]))
    for match, call in (
        ("feat_src has shape", lambda: gat_attention(structure, x[:-1], el, er)),
        ("feat_src has shape", lambda: gat_attention(structure, x[..., 0], el, er)),
        ("el has shape", lambda: gat_attention(structure, x, el[:, :1], er)),
        ("er has shape", lambda: gat_attention(structure, x, el, el)),
        ("er is torch.int64; cast", lambda: gat_attention(structure, x, el, er.long())),
        ("torch.int64 has no softmax", lambda: gat_attention(structure, x.long(), el, er)),
        ("feat_dst has shape", lambda: gatv2_attention(structure, x, x, attn)),
        ("attn has shape", lambda: gatv2_attention(structure, x, feat_dst, attn[:1])),
        (r"p is 1.5", lambda: AttentionDropout(1.5, KEY)),
        ("one run|one for each", lambda: gat_attention(structure, x, el, er, 0.2, AttentionDropout(0.5, KEY, runs))),
        ("row_ids must be", lambda: gat_attention(structure, x, el, er, 0.2, AttentionDropout(0.5, KEY, er))),
        (
            "one for each",
            lambda: gat_attention(structure, x, el, er, 0.2, AttentionDropout(0.5, KEY, torch.arange(1))),
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()
