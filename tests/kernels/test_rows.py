"""Row identity follows a tensor through functions that keep rows apart, and through no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from nugnn.kernels.handlers import DropoutHandler
from nugnn.kernels.interceptor import Interceptor
from nugnn.kernels.rows import REPLICATED, Rows, identity_of, rows_of, tag

WIDTH = 4
WEIGHT = torch.arange(12.0, dtype=torch.float64).view(WIDTH, 3).sin()
GRU = nn.GRUCell(WIDTH, 3).double()
LSTM = nn.LSTM(2, 3, batch_first=True).double()
DEEP = nn.LSTM(2, 3, 2, bidirectional=True, proj_size=2).double()
RNN, CELL = nn.RNN(2, 3, batch_first=True).double(), nn.LSTMCell(2, 3).double()
MASK = torch.tensor([True, False, True, True])
COLUMNS = torch.tensor([2, 0])


def _packed(x: Tensor) -> nn.utils.rnn.PackedSequence:
    """One step of some rows and two of others."""
    lengths = 1 + (x[:, 0] > 0)
    return nn.utils.rnn.pack_padded_sequence(x.view(-1, 2, 2), lengths, batch_first=True, enforce_sorted=False)


# x is (n, 4) rows of nodes; each result has to move with the nodes when they are given in another order
KEEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "two of the same": lambda x: x * x.exp() - x.sigmoid(),
    "untagged operand": lambda x: x * torch.ones(len(x), 1, dtype=x.dtype),
    "where": lambda x: torch.where(x > 0, x, -x),
    "in place": lambda x: x.clone().add_(1).relu_(),
    "type": lambda x: x.float().to(torch.float64).clone().contiguous().detach(),
    "linear": lambda x: F.linear(x, WEIGHT.t()),
    "matmul": lambda x: x @ WEIGHT,
    "matmul, vector": lambda x: x @ WEIGHT[:, 0],
    "matmul, batch": lambda x: x.view(-1, 2, 2) @ WEIGHT[:2],
    "matmul, batch with vector": lambda x: x.view(-1, 2, 2) @ WEIGHT[:2, 0],
    "bmm": lambda x: torch.bmm(x.view(-1, 2, 2), x.view(-1, 2, 2)),
    "addmm": lambda x: torch.addmm(WEIGHT[0], x, WEIGHT),
    "einsum": lambda x: torch.einsum("nd,dk->nk", x, WEIGHT),
    "einsum of two": lambda x: torch.einsum("ij,ik->ijk", x, x.exp()),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp()),
    "gru_cell": lambda x: GRU(x, x[:, :3]),
    "lstm": lambda x: LSTM(x.view(-1, 2, 2))[0],
    "lstm, last state": lambda x: LSTM(x.view(-1, 2, 2))[1][0][-1],
    "lstm, both directions": lambda x: torch.cat([*DEEP(x.view(-1, 2, 2).transpose(0, 1))[1][0][-2:]], dim=1),
    "lstm, states by layer": lambda x: DEEP(x.view(-1, 2, 2).transpose(0, 1))[1][1].view(2, 2, len(x), 3)[-1].sum(0),
    "lstm, states as columns": lambda x: DEEP(x.view(-1, 2, 2).transpose(0, 1))[1][0].transpose(0, 1).flatten(1),
    "lstm, sequences first": lambda x: DEEP(x.view(-1, 2, 2).transpose(0, 1))[0].permute(1, 2, 0),
    "lstm, given states": lambda x: LSTM(x.view(-1, 2, 2), (x[None, :, :3], x[None, :, 1:]))[1][0].squeeze(0),
    "gru": lambda x: nn.GRU(2, 3, batch_first=True).double()(x.view(-1, 2, 2))[1].mean(0) * 0 + x[:, :3],
    "rnn": lambda x: RNN(x.view(-1, 2, 2))[1].movedim(1, 0),
    "lstm_cell": lambda x: [state := CELL(step) for step in x.view(-1, 2, 2).transpose(0, 1)][-1][1] * state[0],
    "packed": lambda x: nn.utils.rnn.pad_packed_sequence(LSTM(_packed(x))[0], batch_first=True, total_length=2)[0],
    "packed, last state": lambda x: LSTM(_packed(x))[1][0][-1],
    "packed, sequences first": lambda x: nn.utils.rnn.pad_packed_sequence(_packed(x), total_length=2)[0][0],
    "packed, lengths": lambda x: nn.utils.rnn.pad_packed_sequence(_packed(x))[1],
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.max(-1).values,
    "max of two": lambda x: torch.max(x, x.neg()),
    "softmax": lambda x: x.softmax(dim=1),
    "topk": lambda x: x.topk(2).values,
    "norm": lambda x: x.norm(2, 1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "view": lambda x: x.view(-1, 2, 2),
    "fold": lambda x: x.view(-1, 2),
    "unfold": lambda x: x.view(-1, 2).mul(2).reshape(len(x), -1),
    "flatten": lambda x: x.view(-1, 2, 2).flatten(0, 1),
    "axes": lambda x: x.unsqueeze(1).expand(-1, 2, WIDTH).transpose(1, 2).permute(0, 2, 1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "repeat": lambda x: x.repeat(1, 3).tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "columns": lambda x: x[:, 1:3],
    "one column": lambda x: x[:, 0],
    "new axis": lambda x: x[:, None],
    "last": lambda x: x[..., -1],
    "picked columns": lambda x: x[:, COLUMNS],
    "masked columns": lambda x: x[..., MASK],
    "index_select columns": lambda x: x.index_select(1, COLUMNS),
    "all rows": lambda x: x[: len(x)],
    "rows with large values": lambda x: x[x[:, 0] > 0],
    "select": lambda x: x.select(1, 2),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "lookup by node data": lambda x: WEIGHT[x.argmax(1)],
    "embedding": lambda x: F.embedding(x.argmax(1), WEIGHT),
    "one_hot": lambda x: F.one_hot(x.argmax(1), WIDTH),
    "cat": lambda x: torch.cat([x, x.exp(), torch.zeros(len(x), 2, dtype=x.dtype)], 1),
    "stack": lambda x: torch.stack([x, x.exp()], -1),
    "chunk": lambda x: torch.chunk(x, 2, dim=-1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "split of rows": lambda x: torch.cat([piece.mul(2).view(-1, 2, 2) for piece in (x,)], 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "index_copy": lambda x: x.index_copy(1, COLUMNS, x[:, :2]),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "roll by name": lambda x: x.roll(shifts=1, dims=1),
    "there and back": lambda x: x.t().exp().t() + x.T.mT + x[None, :, None].squeeze(2)[0],
    "axes moved": lambda x: x.view(-1, 2, 2).permute(1, 2, 0).movedim((0, 2), (2, 0)).swapaxes(1, 2),
    "sum of others": lambda x: x.view(-1, 2, 2).transpose(0, 1).sum(0),
    "softmax of others": lambda x: x.t().softmax(0).t(),
    "stacked and averaged": lambda x: torch.stack([x, x.exp()]).mean(0),
    "matrix on the left": lambda x: (WEIGHT.t() @ x.t()).t(),
    "heads": lambda x: x.view(-1, 2, 2).transpose(0, 1).reshape(2, -1, 1).mul(2).view(2, len(x), 2).transpose(0, 1),
    "one place of each": lambda x: x.view(-1, 2, 2)[torch.arange(len(x)), (x[:, 0] > 0).long()],
    "rows of another axis": lambda x: x.t()[:, x[:, 0] > -2].t(),
    "windows": lambda x: x.unfold(1, 2, 1),
    "pieces of another axis": lambda x: torch.cat([x.t().chunk(2)[0], x.t().split(2)[1]]).t(),
    "data": lambda x: x.data,
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmin(1), reduction="none"),
}

DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t(),
    "transpose by number": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "sum over rows": lambda x: x.sum(0),
    "mean over all": lambda x: x.mean(),
    "softmax over rows": lambda x: x.softmax(0),
    "sort of rows": lambda x: x.sort(0).values,
    "cumsum over rows": lambda x: x.cumsum(0),
    "normalize over rows": lambda x: F.normalize(x, dim=0),
    "layer_norm over rows": lambda x: F.layer_norm(x, tuple(x.shape)),
    "gram matrix": lambda x: x.t() @ x,
    "einsum that mixes rows": lambda x: torch.einsum("nd,md->nm", x, x),
    "einsum that moves rows": lambda x: torch.einsum("nd->dn", x),
    "left factor": lambda x: torch.ones(len(x), len(x), dtype=x.dtype) @ x,
    "batch of matrices": lambda x: x @ WEIGHT.expand(len(x), WIDTH, 3),
    "new first axis": lambda x: x.unsqueeze(0),
    "first index": lambda x: x[0],
    "None index": lambda x: x[None],
    "pairs of rows": lambda x: torch.cat([x, x], 0),
    "stacked in front": lambda x: torch.stack([x, x]),
    "expanded in front": lambda x: x.expand(2, -1, -1),
    "merged rows": lambda x: x.view(1, -1),
    "rolled": lambda x: x.roll(1, 0),
    "flipped rows": lambda x: x.flip(0),
    "random order": lambda x: torch.flip(x, (0, 1)),
    "recurrent over rows": lambda x: nn.LSTM(WIDTH, 3).double()(x[:, None])[0],
    "one-dimensional linear": lambda x: F.linear(x[:, 0], torch.ones(2, len(x), dtype=x.dtype)),
    "in-place transpose": lambda x: x.clone().transpose_(0, 1),
    "a column for each row": lambda x: x[:, :3] + x[:3, 0] if len(x) > 2 else x.sum(),
    "sum over turned rows": lambda x: x.t().sum(1),
    "state of a neighbour": lambda x: LSTM(x.view(-1, 2, 2))[1][0].sum(1),
    "recurrent over steps of other rows": lambda x: LSTM(x.view(-1, 2, 2).transpose(0, 1))[0].transpose(0, 1),
    "given states of other rows": lambda x: LSTM(x.view(-1, 2, 2), (_other(x)[None, :, :3], x[None, :, 1:]))[1][0][-1],
    "all steps of all": lambda x: DEEP(x.view(-1, 2, 2).transpose(0, 1))[0].flatten(0, 1),
    "packed, in the order of steps": lambda x: LSTM(_packed(x))[0].data.flip(0),
}


def _other(x: Tensor) -> Tensor:
    return _nodes(rows_of(x).row_ids(len(x)) + 1)  # type: ignore[union-attr]


def _nodes(ids: Tensor) -> Tensor:
    """Rows whose values are a function of the id."""
    x = torch.cos(ids.double()[:, None] * torch.tensor([1.0, 2.0, 3.0, 5.0]) + 1)
    return tag(x, Rows("node", ids, split=True))


def _apply(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with Interceptor(()).step(0):
        return function(x)


@pytest.mark.parametrize("name", KEEPS)
@settings(max_examples=15, deadline=None)
@given(ids=st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True), seed=st.integers(0, 99))
def test_results_move_with_their_nodes(name: str, ids: list[int], seed: int) -> None:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    both = []
    for some in (torch.tensor(ids), torch.tensor(ids)[order]):
        out = _apply(KEEPS[name], _nodes(some))
        rows = rows_of(out)
        assert rows is not None and rows.kind == "node" and rows.split
        assert rows.num_rows == len(out)
        row_ids = rows.row_ids(len(out))
        assert len(row_ids.unique()) == len(out)
        both.append(out.detach()[row_ids.argsort()])
    # the same row of numbers, but vector instructions may group columns otherwise: a few roundings of values below 50
    torch.testing.assert_close(both[0].double(), both[1].double(), rtol=1e-6 if name == "type" else 1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("num_rows", [3, 4, 7])
def test_other_results_have_no_identity(name: str, num_rows: int) -> None:
    assert rows_of(_apply(DROPS[name], _nodes(torch.arange(num_rows) + 10))) is None


# another axis than the first, and what stands on the other ones
TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t(),
    "new axis": lambda x: torch.stack([x, x]).exp(),
    "permuted": lambda x: x.view(-1, 2, 2).permute(1, 2, 0),
    "expanded": lambda x: x.expand(2, -1, -1) + x,
    "all of a matrix": lambda x: torch.ones(3, WIDTH, dtype=x.dtype) @ x.t(),
    "batch of matrices": lambda x: x @ WEIGHT.expand(5, WIDTH, 3),
    "einsum": lambda x: torch.einsum("nd,dk->kn", x, WEIGHT),
    "linear": lambda x: F.layer_norm(F.linear(x[None], WEIGHT.t()), (3,)),
    "embedding": lambda x: F.embedding(x.argsort(1).t(), WEIGHT),
    "states": lambda x: DEEP(x.view(-1, 2, 2).transpose(0, 1))[1][0].view(2, 2, -1, 2),
    "picked": lambda x: x.t().index_select(1, torch.arange(len(x)).flip(0))[1:],
    "repeated": lambda x: x.t().repeat(2, 3, 1),
    "squeezed": lambda x: x[None, None].squeeze(0).narrow(2, 1, 2),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("num_rows", [2, 5])
def test_rows_along_another_axis(name: str, num_rows: int) -> None:
    """The law of the results above: each slice along the axis is that of its node, in any company."""
    ids = torch.arange(num_rows) * 7 + 3
    whole, order = _apply(TURNED[name], _nodes(ids)), torch.arange(num_rows).flip(0)
    other = _apply(TURNED[name], _nodes(ids[order]))
    slices = []
    for out in (whole, other):
        rows = identity_of(out)
        assert rows is not None and rows.axis > 0 and rows_of(out) is None and rows.num_rows == num_rows
        slices.append(out.detach().movedim(rows.axis, 0)[rows.row_ids(num_rows).argsort()])
    torch.testing.assert_close(*slices, rtol=1e-12, atol=1e-12)


def test_an_axis_that_comes_back_brings_the_identity_back() -> None:
    x = _nodes(torch.arange(3))
    assert rows_of(_apply(lambda x: x.t().t(), x)) is rows_of(x)
    turned = identity_of(_apply(lambda x: x.t(), x))
    assert turned.at(0) is rows_of(x) and turned.at(2).at(1) is turned  # type: ignore[union-attr]


@pytest.mark.parametrize("turn", [lambda x: x.transpose(0, 1), lambda x: x.permute(2, 0, 1), lambda x: x[None]])
def test_dropout_of_turned_rows_is_that_of_the_rows(turn: Callable[[Tensor], Tensor]) -> None:
    """A mask belongs to the node, wherever its axis stands."""

    def dropped(ids: Tensor) -> Tensor:
        with Interceptor((DropoutHandler(is_split=True),), seed=2).step(0):
            out = F.dropout(turn(_nodes(ids).view(-1, 2, 2)), 0.5)
            return out.movedim(identity_of(out).axis, 0)  # type: ignore[union-attr]

    ids = torch.arange(8) + 3
    whole = dropped(ids)
    assert 0 < int((whole == 0).sum()) < whole.numel()
    for part in ids.split([5, 3]):
        assert torch.equal(dropped(part), whole[part - 3])


def test_steps_of_packed_sequences_have_masks_of_their_own() -> None:
    """Equal for any company, though the steps of longer sequences come first; other ones in each step."""

    def dropped(ids: Tensor) -> dict[int, Tensor]:
        with Interceptor((DropoutHandler(is_split=True),), seed=2).step(0):
            out = F.dropout(_packed(_nodes(ids)).data, 0.5) != 0
        rows = rows_of(out) or rows_of(_apply(lambda x: _packed(x).data, _nodes(ids)))
        return dict(zip(rows.row_ids(len(out)).tolist(), out, strict=True))  # type: ignore[union-attr]

    ids = torch.arange(12)
    whole = dropped(ids)
    assert len(whole) == len(_packed(_nodes(ids)).data) and len({tuple(mask.tolist()) for mask in whole.values()}) > 2
    for part in ids.split([5, 7]):
        assert all(torch.equal(whole[step], mask) for step, mask in dropped(part).items())


def test_different_nodes_do_not_mix() -> None:
    x, y = _nodes(torch.tensor([1, 2, 3])), _nodes(torch.tensor([1, 2, 4]))
    for function in (lambda: x + y, lambda: torch.cat([x, y], 1), lambda: torch.einsum("nd,nk->nk", x, y)):
        assert rows_of(_apply(lambda _, f=function: f(), x)) is None
    edges = tag(torch.zeros(3, 4), Rows("edge", torch.tensor([1, 2, 3])))
    assert rows_of(_apply(lambda _: x + edges, x)) is None


def test_what_decides_may_stand_anywhere_among_the_arguments() -> None:
    x, other, flags = _nodes(torch.tensor([1, 2, 3])), _nodes(torch.tensor([1, 2, 4])), torch.ones(3, 4) > 0
    column, ones = x[:, :1], torch.ones(3, 4, dtype=x.dtype)

    def kept(function: Callable[[Tensor], Tensor]) -> list[int] | None:
        rows = rows_of(_apply(function, x))
        return None if rows is None else rows.row_ids(3).tolist()

    for function in (
        lambda x: ones * x,
        lambda x: column * x,
        lambda x: torch.add(input=x, other=x.exp()),
        lambda x: torch.add(x, other=ones, alpha=2),
        lambda x: torch.where(flags, x, ones),
        lambda x: x.clone().add_(x),
    ):
        assert kept(function) == [1, 2, 3]
    for function in (
        lambda x: torch.add(x, other=other),
        lambda x: torch.addcmul(x, ones, other),
        lambda x: torch.where(flags, x, other),
        lambda x: x[0] + other[0],
    ):
        assert kept(function) is None


def test_equal_selections_agree() -> None:
    x = _nodes(torch.arange(6))
    picked = torch.tensor([4, 1])
    out = _apply(lambda x: x[picked] + x.exp().index_select(0, picked), x)
    assert rows_of(out).row_ids(2).tolist() == [4, 1]  # type: ignore[union-attr]


def test_pieces_of_rows_know_theirs() -> None:
    def pieces(x: Tensor) -> Tensor:
        first, second = x.split([2, 3])
        assert rows_of(first).row_ids(2).tolist() == [10, 11]  # type: ignore[union-attr]
        return second

    assert rows_of(_apply(pieces, _nodes(torch.arange(10, 15)))).row_ids(3).tolist() == [12, 13, 14]  # type: ignore[union-attr]


def test_replicated_values_stay_replicated_only_among_their_like() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    assert rows_of(_apply(lambda w: (w * 2).sum(0), weight)) is REPLICATED
    assert rows_of(_apply(lambda w: w * torch.ones(3, 4), weight)) is None
    nodes = _nodes(torch.arange(3)).float()
    assert rows_of(_apply(lambda w: tag(nodes, Rows("node", torch.arange(3))) * w, weight)).kind == "node"  # type: ignore[union-attr]


def test_no_identity_without_a_rule() -> None:
    assert rows_of(_apply(lambda x: torch.cdist(x, x), _nodes(torch.arange(WIDTH)))) is None


def test_a_lone_row_is_treated_like_many() -> None:
    for name, function in {**KEEPS, **DROPS}.items():
        if name in ("rows with large values", "merged rows"):
            continue  # may pick nothing, merges nothing
        one = rows_of(_apply(function, _nodes(torch.tensor([7]))))
        assert (one is not None) == (name in KEEPS), name


@pytest.mark.parametrize("network", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_recurrent_layers_is_refused_on_a_split_graph(network: type[nn.Module], packed: bool) -> None:
    x = torch.zeros(3, 2, 2)
    given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 2, 1]), batch_first=True) if packed else x
    module = network(2, 2, 2, batch_first=True, dropout=0.5)
    split = Interceptor((DropoutHandler(is_split=True),), module)
    with split.step(0), pytest.raises(NotImplementedError, match="stack one-layer networks"):
        module(given)
    module.eval()
    with split.step(0):
        module(given)
    with Interceptor((DropoutHandler(is_split=False),), module).step(0):
        module.train()(given)


def test_one_sample_behind_an_axis_is_not_taken_for_the_entries_of_it() -> None:
    """(T, 1, D) to (T, D) joins the single sample with the axis before it, as with more samples it would be seen to."""
    for num_samples in (1, 2):
        with Interceptor(()).step(0):
            x = tag(torch.ones(num_samples, 4, 3), Rows("sample", torch.arange(num_samples))).permute(1, 0, 2)
            assert identity_of(x.flatten(0, 1)) is identity_of(x.ravel()) is None
            flat = identity_of(x.flatten(1))
            assert flat is not None and (flat.axis, flat.fold) == (1, 3)
            assert identity_of(x[:1].flatten(0, 1)) is not None
