"""The law of draws: whatever function of torch draws random numbers is refused over several ranks, and left on one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, get_overridable_functions

from nugnn.batches import Batch
from nugnn.comm.groups import Ranks
from nugnn.kernels.operator_call import KIND_OF
from nugnn.kernels.random_draws import draws, draws_now
from nugnn.samples import as_samples, intercept_samples

TWO = Ranks(rank=0, world_size=2)  # nothing here comes to an exchange


def _seeded_names() -> set[str]:
    """Names of torch's operators that it marks as seeded."""
    names = {name[6:].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    return {
        name
        for name, packet in packets.items()
        if packet is not None
        and any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())
    }


SEEDED = _seeded_names()
HALF = torch.full((4, 3), 0.5)
LSTM = (torch.ones(4, 2, 3), [torch.zeros(2, 4, 3)] * 2)
WEIGHTS = [torch.ones(12, 3), torch.ones(12, 3), torch.ones(12), torch.ones(12)] * 2


def _recurrent(gates: int, states: Any) -> tuple[Any, ...]:
    weights = [torch.ones(gates * 3, 3), torch.ones(gates * 3, 3), torch.ones(gates * 3), torch.ones(gates * 3)] * 2
    return (torch.ones(4, 2, 3), states, weights, True, 2, 0.5, True, False, True)


STATE = torch.zeros(2, 4, 3)
PUBLIC: dict[Any, tuple[Any, ...]] = {
    **{torch.rand: (3,), torch.randn: (3,), torch.randint: (5, (3,)), torch.randperm: (5,)},
    **{torch.rand_like: (HALF,), torch.randn_like: (HALF,), torch.randint_like: (HALF, 5)},
    **{torch.normal: (0.0, 1.0, (3,)), torch.bernoulli: (HALF,), torch.poisson: (HALF,)},
    **{torch.multinomial: (HALF, 2), torch.binomial: (HALF * 10, HALF), torch.rrelu: (-HALF, 0.1, 0.3, True)},
    **{torch.rrelu_: (-HALF, 0.1, 0.3, True), torch.native_dropout: (HALF, 0.5, True)},
    **{torch.dropout: (HALF, 0.5, True), torch.dropout_: (HALF, 0.5, True)},
    **{torch.alpha_dropout: (HALF, 0.5, True), torch.alpha_dropout_: (HALF, 0.5, True)},
    **{torch.feature_dropout: (HALF, 0.5, True), torch.feature_dropout_: (HALF, 0.5, True)},
    **{torch.feature_alpha_dropout: (HALF, 0.5, True), torch.feature_alpha_dropout_: (HALF, 0.5, True)},
    torch.lstm: _recurrent(4, [STATE, STATE]),
    torch.gru: _recurrent(3, STATE),
    torch.rnn_tanh: _recurrent(1, STATE),
    torch.rnn_relu: _recurrent(1, STATE),
    F.scaled_dot_product_attention: (HALF[None], HALF[None], HALF[None], None, 0.5),
    **{Tensor.bernoulli: (HALF,), Tensor.bernoulli_: (HALF,), Tensor.multinomial: (HALF, 2)},
    **{Tensor.uniform_: (HALF,), Tensor.normal_: (HALF,), Tensor.exponential_: (HALF,), Tensor.random_: (HALF,)},
    **{Tensor.cauchy_: (HALF,), Tensor.log_normal_: (HALF,), Tensor.geometric_: (HALF, 0.5)},
    **{F.dropout: (HALF,), F.dropout1d: (HALF,), F.dropout2d: (HALF[None, None],)},
    F.dropout3d: (HALF[None, None, None],),
    **{F.alpha_dropout: (HALF, 0.5, True), F.feature_alpha_dropout: (HALF, 0.5, True)},
    **{F.rrelu: (-HALF, 0.1, 0.3, True), F.gumbel_softmax: (HALF,)},
    F.fractional_max_pool2d: (torch.ones(1, 1, 8, 8), 2, 4),
    F.fractional_max_pool2d_with_indices: (torch.ones(1, 1, 8, 8), 2, 4),
    F.fractional_max_pool3d: (torch.ones(1, 1, 8, 8, 8), 2, 4),
    F.fractional_max_pool3d_with_indices: (torch.ones(1, 1, 8, 8, 8), 2, 4),
    **{nn.init.normal_: (HALF,), nn.init.uniform_: (HALF,), nn.init.kaiming_uniform_: (HALF,)},
    **{nn.init.kaiming_normal_: (HALF,), nn.init.trunc_normal_: (HALF,), nn.init.xavier_normal_: (HALF,)},
    **{torch.pca_lowrank: (HALF,), torch.svd_lowrank: (HALF,)},
    torch.ops.aten.rand.default: ([3],),
    torch.ops.aten.rand_like: (HALF,),
    torch._standard_gamma: (HALF,),
    torch._sample_dirichlet: (HALF,),
}
"""Every public function that draws, with arguments with which it does."""
_OF_MANY = {F.multi_head_attention_forward, torch.lobpcg}  # with more arguments than are worth it here


def _copied(values: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, torch.clone, values)


def _run(function: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    out = function(*_copied(PUBLIC[function]))
    assert not torch.equal(before, torch.get_rng_state()), "it draws"
    return out


def test_every_public_function_that_draws_is_among_those_tried() -> None:
    homes = (torch, Tensor, torch.nn.functional)
    named = (getattr(home, name, None) for home in homes for name in SEEDED if name[0] != "_")
    public = {each for each in named if callable(each)} - {torch.miopen_rnn}  # of another vendor's GPUs
    assert len(public) > 40 and public <= PUBLIC.keys(), {str(function) for function in public - PUBLIC.keys()}


def test_every_function_in_python_that_draws_inside_is_known() -> None:
    """By the names in their code: of operators that draw, or of functions in whose code they are."""
    homes = {f"torch.{name}" for name in ("nn.functional", "functional", "_lowrank", "_lobpcg", "_tensor", "nn.init")}

    def reaches(root: Any) -> bool:
        waiting, seen = [root], set()
        while waiting:
            function = waiting.pop()
            if isinstance(function, types.FunctionType) and function.__module__ in homes and function not in seen:
                seen.add(function)
                names = function.__code__.co_names
                if not SEEDED.isdisjoint(names):
                    return True
                waiting += [function.__globals__.get(name) for name in names]
        return False

    functions = {each for group in get_overridable_functions().values() for each in group}
    found = {each for each in functions if reaches(each)}
    assert len(found) > 10 and found <= PUBLIC.keys() | _OF_MANY, {each.__qualname__ for each in found}


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: str(getattr(function, "__qualname__", function)))
def test_what_draws_is_refused_over_ranks_and_plain_on_one(function: Callable[..., Any]) -> None:
    plain = _run(function)
    with intercept_samples(nn.Identity(), Ranks()).step(0):
        alone = _run(function) if KIND_OF.get(function) != "dropout" else plain
    torch.testing.assert_close(alone, plain, rtol=0, atol=0, equal_nan=True)
    refusals = (NotImplementedError, ValueError)  # the latter from dropout, of rows whose samples are not known
    with intercept_samples(nn.Identity(), TWO).step(0), pytest.raises(refusals, match=r"test_random_draws\.py, line"):
        torch.manual_seed(0)
        function(*_copied(PUBLIC[function]))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.rrelu(HALF, training=False),
        lambda: torch.rrelu(HALF, 0.1, 0.3, False),
        lambda: torch.native_dropout(HALF, 0.5, False),
        lambda: F.scaled_dot_product_attention(HALF[None], HALF[None], HALF[None]),
        lambda: F.fractional_max_pool2d(torch.ones(1, 1, 8, 8), 2, 4, _random_samples=torch.full((1, 1, 2), 0.5)),
        lambda: F.dropout2d(HALF[None, None], 0.5, False),
        lambda: torch.lstm(*LSTM, WEIGHTS, True, 2, 0.5, False, False, True),
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[HALF[None, None]] * 3),
    ],
)
def test_what_does_not_draw_now_passes(call: Callable[[], Any]) -> None:
    before = torch.get_rng_state()
    with intercept_samples(nn.Identity(), TWO).step(0):
        call()
    assert torch.equal(before, torch.get_rng_state())


def test_what_looks_like_a_draw_and_is_none() -> None:
    for function in (torch.add, Tensor.__getitem__, F.linear, torch.sort, Tensor.dtype.__get__, nn.init.constant_):
        assert not draws(function)
    assert not draws_now(torch.rrelu, (HALF,), {"training": False})


class _DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty((len(x), 1)).bernoulli_(0.5)


def test_the_error_names_the_module_the_function_and_what_to_write() -> None:
    x = as_samples(Batch(torch.arange(4), torch.ones(4, 3)), TWO).data
    model = nn.Sequential(nn.Linear(3, 3), _DropPath())
    with intercept_samples(model, TWO).step(0), pytest.raises(NotImplementedError) as caught:
        model(x)
    line = _DropPath.forward.__code__.co_firstlineno + 1
    assert str(caught.value).startswith("1/random: bernoulli_ draws random numbers by position, so they would depend")
    assert f"test_random_draws.py, line {line})" in str(caught.value)
    assert "x * F.dropout(torch.ones_like(x[:, :1]), p, self.training)" in str(caught.value)


def test_what_the_error_says_to_write_is_exact() -> None:
    """A mask for each sample, wherever the sample is; and one for all, the same on every rank."""
    x = torch.ones(6, 3, 2, 2)

    def forward(ranks: Ranks, rows: slice) -> tuple[Tensor, Tensor]:
        own = as_samples(Batch(torch.arange(6)[rows], x[rows]), ranks).data
        with intercept_samples(nn.Identity(), ranks).step(0):
            one = F.dropout(nn.Parameter(torch.ones(8)), 0.5, True)  # replicated, as nugnn.as_replicated says
            return own * F.dropout(torch.ones_like(own[:, :1, :1, :1]), 0.5, True), one

    whole, for_all = forward(Ranks(), slice(None))
    assert {float(value) for value in whole.flatten(1).amax(1)} == {0.0, 2.0} and len(for_all.unique()) == 2
    for rows in (slice(0, 4), slice(4, 6), slice(0, 0)):
        part, same = forward(TWO, rows)
        assert torch.equal(part, whole[rows]) and torch.equal(same, for_all)


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_distributions_and_lobpcg_draw() -> None:
    """Of functions that no mode sees as a whole it sees what they call."""
    with _Seen() as seen:
        torch.lobpcg(torch.eye(9), 2)
        for distribution in (torch.distributions.Beta(1.0, 1.0), torch.distributions.Categorical(torch.ones(3))):
            distribution.sample()
    assert {"randn", "_sample_dirichlet", "multinomial"} <= seen.names
