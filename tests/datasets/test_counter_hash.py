"""counter_hash against published numbers and against its documented layout in plain Python integers."""

import hashlib

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nugnn.datasets.counter_hash import (
    below,
    below_tensor,
    counter_hash,
    counter_hash_tensor,
    high_word,
    splitmix,
    unsigned_order,
)

GOLDEN = 0x9E3779B97F4A7C15
WORD = st.integers(0, 2**64 - 1)


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def bits(seed, stream, counter):
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    key = mix((mix((seed + GOLDEN) % 2**64) + number) % 2**64)
    return mix((key + (counter + 1) * GOLDEN) % 2**64)


def test_sequence_is_the_published_splitmix64():
    # first outputs for seed 1234567 of Vigna's splitmix64.c, as listed on Rosetta Code
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix(1234567, np.arange(4)).tolist() == published


@given(st.integers(-(2**70), 2**70), st.text(max_size=8), st.lists(st.integers(0, 2**62), max_size=5))
def test_bits_follow_the_documented_layout(seed, stream, counters):
    expected = [bits(seed, stream, counter) for counter in counters]
    assert counter_hash(seed, stream, np.array(counters, dtype=np.int64)).tolist() == expected


def test_shape_is_kept_and_the_counters_are_not_modified():
    counters = np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert counter_hash(0, "x", counters).shape == (2, 3)
    assert counters.tolist() == [[0, 1, 2], [3, 4, 5]]


@given(st.lists(st.tuples(WORD, st.integers(1, 2**32 - 1)), min_size=1, max_size=20))
def test_below_is_the_documented_product_and_in_range(pairs):
    words, limits = np.array([w for w, _ in pairs], dtype=np.uint64), np.array([n for _, n in pairs])
    result = below(words, limits).tolist()
    assert result == [((w >> 32) * n) >> 32 for w, n in pairs]
    assert all(0 <= value < n for value, (_, n) in zip(result, pairs, strict=True))


def test_streams_and_seeds_are_unrelated():
    counters = np.arange(4096)
    a, b, c = counter_hash(0, "a", counters), counter_hash(0, "b", counters), counter_hash(1, "a", counters)
    for one, other in ((a, b), (a, c), (b, c)):
        equal_bits = np.bitwise_count(~(one ^ other)).sum()
        # 64 * 4096 fair coins: mean half, standard deviation 256; 5 of them
        assert abs(int(equal_bits) - 64 * 4096 // 2) <= 5 * 256


def as_tensor(words):
    return torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))


@given(st.integers(-(2**70), 2**70), st.text(max_size=8), st.lists(st.integers(0, 2**62), max_size=40))
def test_bits_on_tensors_are_the_bits_of_numpy(seed, stream, counters):
    counters = np.array(counters, dtype=np.int64)
    given_counters = torch.from_numpy(counters.copy())
    bits = counter_hash_tensor(seed, stream, given_counters)
    assert bits.numpy().view(np.uint64).tolist() == counter_hash(seed, stream, counters).tolist()
    assert given_counters.tolist() == counters.tolist()


@given(st.lists(st.tuples(WORD, st.integers(1, 2**32 - 1)), min_size=1, max_size=20))
def test_below_on_tensors_is_below_of_numpy(pairs):
    words, limits = np.array([w for w, _ in pairs], dtype=np.uint64), np.array([n for _, n in pairs])
    expected = below(words, limits).tolist()
    assert below_tensor(as_tensor(words), torch.from_numpy(limits)).tolist() == expected
    assert [int(below_tensor(as_tensor([w]), n)) for w, n in pairs] == expected


@given(st.lists(WORD, min_size=1, max_size=20))
def test_words_on_tensors_keep_their_unsigned_meaning(words):
    assert high_word(as_tensor(words)).tolist() == [w >> 32 for w in words]
    order = torch.argsort(unsigned_order(as_tensor(words)), stable=True)
    assert [words[place] for place in order.tolist()] == sorted(words)
