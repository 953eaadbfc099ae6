"""Settings: what is accepted, what is refused and in which words, and the way through YAML."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nugnn.config import TrainConfig
from nugnn.options import ConfigError, flag_of, option_spec
from nugnn.sample_config import SampleConfig
from nugnn.settings_file import read_recipe, read_settings, recipe_names


def test_defaults_are_valid_and_frozen() -> None:
    config = TrainConfig()
    assert config.fractions == (1.0,)
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


def test_every_option_says_what_it_does() -> None:
    for entry in fields(TrainConfig):
        spec = option_spec(entry)
        assert spec.help.endswith("."), entry.name
        assert not (spec.later or not spec.landed) or spec.later_what, entry.name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": 0}, "--lr 0 is not allowed; allowed: a number above 0"),
        ({"lr": "fast"}, "--lr fast is not allowed; allowed: a number above 0"),
        ({"lr": math.nan}, "--lr nan is not allowed"),
        ({"layers": 2.5}, "--layers 2.5 is not allowed; allowed: a whole number from 1 up"),
        ({"layers": True}, "--layers True is not allowed"),
        ({"epochs": "1e3"}, "--epochs 1e3 is not allowed"),
        ({"dropout": 1}, "--dropout 1 is not allowed; allowed: a number from 0 up to, but not including, 1"),
        ({"seed": -1}, "--seed -1 is not allowed"),
        ({"undirected": "maybe"}, "--undirected maybe is not allowed; allowed: true or false"),
        ({"undirected": 0}, "--undirected 0 is not allowed; allowed: true or false"),
        ({"norm": "group"}, "--norm group is not allowed; allowed: none, layer, batch"),
        ({"norm": None}, "--norm None is not allowed; allowed: none, layer, batch"),
        ({"model": "mlp"}, "allowed: gcn, sage, gat, gatv2, gin or FILE.py:Class"),
        ({"model": "net.py:2Net"}, "FILE.py:Class"),
        ({"heads": 4}, "--heads 4 has no effect on --model gcn, only on gat, gatv2"),
        ({"model": "gat", "aggregator": "pool"}, "--aggregator pool has no effect on --model gat"),
        ({"model": "gin", "aggregator": "lstm"}, "--aggregator lstm is not allowed; allowed: sum, mean, max for gin"),
        ({"model": "sage", "aggregator": "sum"}, "--aggregator sum is not allowed; allowed: mean, gcn, pool, lstm"),
        ({"dataset": ""}, "--dataset '' is not allowed"),
    ],
)
def test_wrong_value_names_option_value_and_allowed(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert words in str(caught.value)


_LATER = [{"precision": value} for value in ("int8", "fp8", "auto", "my-plan.json")]


@pytest.mark.parametrize("values", _LATER, ids=str)
def test_what_has_not_landed_is_refused_in_those_words(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    name = next(iter(values))
    assert str(caught.value).startswith(flag_of(name)) and "has not landed yet" in str(caught.value)


def test_text_that_yaml_does_not_see_as_a_number_is_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 5e-4\nweight-decay: 1e-3\n")
    config = TrainConfig.from_file(file)
    assert (config.lr, config.weight_decay) == (5e-4, 1e-3)


@pytest.mark.parametrize(
    ("shares", "workers", "words"),
    [
        ("0.5,0.5", 3, "2 shares for --workers 3"),
        ("0.5,0.6", 2, "add up to 1.1, not 1"),
        ("1.5,-0.5", 2, "is not allowed"),
        ("0.5,x", 2, "is not allowed; allowed: even, auto, flops, bandwidth, or 2 positive fractions"),
        ("0.5,nan", 2, "is not allowed"),
        ("uneven", 2, "is not allowed"),
        ([True], 1, "is not allowed"),
        (0.5, 1, "is not allowed"),
        ([], 1, "0 shares for --workers 1"),
    ],
)
def test_wrong_shares(shares: Any, workers: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(shares=shares, workers=workers)
    assert words in str(caught.value)


@pytest.mark.parametrize("word", ["auto", "flops", "bandwidth"])
def test_shares_by_device_stay_words_and_are_no_numbers_yet(word: str) -> None:
    config = TrainConfig(shares=word, workers=3)
    assert config.shares == word and TrainConfig(**config.to_dict()) == config
    with pytest.raises(ConfigError, match=f"--shares {word} takes a model and devices"):
        _ = config.fractions
    samples = SampleConfig(dataset="mnist", shares=word, workers=3)
    assert samples.fit_shares == word and samples.given_shares is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"plan": "p.json", "cluster": "c.yaml"}, "--plan p.json says the devices; leave --cluster out"),
        ({"shares": "auto", "partitioner": "random"}, "--partitioner random makes none to fit"),
    ],
)
def test_plans_that_contradict_other_settings_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert words in str(caught.value)


def test_a_batch_is_divided_by_one_word() -> None:
    with pytest.raises(ConfigError, match="--shares auto says how batches are divided; leave --batch-split out"):
        SampleConfig(dataset="mnist", workers=2, shares="auto", batch_split="18,6")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_shares_written_with_two_decimals_add_up_to_one(weights: list[int]) -> None:
    written = [max(round(weight / sum(weights), 2), 0.01) for weight in weights]
    if abs(sum(written) - 1) > 0.005 * len(written):
        return  # a weight below half a per cent was raised to 0.01
    config = TrainConfig(shares=",".join(map(str, written)), workers=len(written))
    # Each quotient is rounded once, 2^-53 relative, and fsum rounds the sum once.
    assert abs(math.fsum(config.fractions) - 1) <= 2 * 2**-52 * len(written)
    for fraction, part in zip(config.fractions, written, strict=True):
        assert fraction == pytest.approx(part / sum(written), rel=2**-50)


def test_exact_shares_stay_as_written() -> None:
    assert TrainConfig(shares="0.7,0.2,0.1", workers=3).fractions == (0.7, 0.2, 0.1)


_ANY = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-12, 10),
        "dropout": st.floats(0, 0.999),
        "epochs": st.integers(1, 10**6),
        "patience": st.none() | st.integers(1, 100),
        "undirected": st.booleans(),
        "dataset": st.none() | st.text(min_size=1).filter(str.isprintable),
        "norm": st.sampled_from(["none", "layer", "batch"]),
        "shares": st.sampled_from(["even", "0.3,0.7", [0.5, 0.5]]),
        "workers": st.just(2),
    }
)


@given(values=_ANY)
def test_yaml_there_and_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    config = TrainConfig(**values)
    file = tmp_path_factory.mktemp("yaml") / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_file(file) == config
    assert TrainConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", "unknown option 'epoch' (did you mean 'epochs'"),
        ("- 1", "expected lines of 'option: value', found list"),
        ("", "found NoneType"),
        ("a: [", "not valid YAML"),
        ("lr: 1\nlr: 2\nself-loops: add\nself_loops: keep", "'self_loops' is set twice"),
        ("lr: -1", "--lr -1 is not allowed"),
        ("batch_size: 8", "--batch-size belongs to samples, and no --dataset is given"),
        ("dataset: cora\nflip: true", "--flip belongs to samples, and --dataset cora names a graph"),
        ("dataset: mnist\nflip: true", "--dataset mnist names samples, and this needs a graph"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_file(file)
    assert str(file) in str(caught.value) and words in str(caught.value)


def test_a_file_for_a_graph_is_none_for_samples(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TrainConfig(dataset="cora").to_yaml())
    with pytest.raises(ConfigError, match=r"mine\.yaml: --dataset cora is not allowed; allowed: digits-images"):
        SampleConfig.from_file(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_valid_and_named_after_what_it_trains(name: str) -> None:
    config = TrainConfig(**read_recipe(name))
    assert name == f"{config.dataset}-{config.model}"
    assert config.out_dir == Path("runs") / name


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"cora-gnc is not known .did you mean .cora-gcn.*; known: amazon-computers-gcn"
    ):
        read_recipe("cora-gnc")


def test_model_from_a_file() -> None:
    config = TrainConfig(model="nets/mine.py:MyNet", dataset="some/folder/graph.npz")
    assert config.model_file == (Path("nets/mine.py"), "MyNet")
    assert config.out_dir == Path("runs/graph-mynet")
    assert TrainConfig().model_file is None
