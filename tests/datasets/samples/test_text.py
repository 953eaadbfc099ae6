"""Texts: tokens learned from the training part, the same in every process; files refused by line."""

import gzip
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from nugnn.datasets.samples import load_preparation, load_samples

WORDS = ["river", "mountain", "cat", "violin", "yesterday", "Ünder", "日本", "blue"]
ROWS = [(i % 3, f"{WORDS[i % 8]} {WORDS[(i * 5) % 7]} number {i}") for i in range(60)]


def tsv(rows, header="label\ttext"):
    return "".join(f"{line}\n" for line in [header, *(f"{label}\t{text}" for label, text in rows)])


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_becomes_token_numbers(tmp_path):
    data = load_samples(f"text:{write(tmp_path / 'a.tsv', tsv(ROWS))}")
    assert [len(part) for _, part in data.parts] == [42, 6, 12]
    assert (data.kind, data.class_names) == ("text", ("0", "1", "2"))
    (length,) = data.input_shape
    assert length % 8 == 0
    x, _ = data.train[0]
    assert (x.dtype, x.shape) == (torch.int64, (length,))
    for _, part in data.parts:
        assert part.x.max() < data.vocabulary_size
        num_tokens = (part.x != 0).sum(1)
        assert num_tokens.min() >= 1
        is_token = torch.arange(length) < num_tokens[:, None]
        assert torch.equal(is_token, part.x != 0), "0 stands behind the end only"
    tokenizer = data.preparation.tokenizer
    texts = {tokenizer.decode(ids[ids > 0].tolist()).strip() for ids in data.train.x}
    assert texts <= {text.lower() for _, text in ROWS}


def test_tokens_are_learned_from_the_training_texts_alone(tmp_path):
    write(tmp_path / "train.tsv", tsv(ROWS))
    write(tmp_path / "test.tsv", tsv(ROWS[:3]))
    before = load_samples(f"text:{tmp_path}", val_fraction=0)
    write(tmp_path / "test.tsv", tsv([(0, "xylophone xylophone xylophone " * 30)]))
    after = load_samples(f"text:{tmp_path}", val_fraction=0)
    assert before.preparation.to_json() == after.preparation.to_json()
    assert torch.equal(before.train.x, after.train.x)
    assert (after.test.x[0] != 0).all(), "cut to the length of the training texts"


def test_options_bound_vocabulary_and_length(tmp_path):
    path = write(tmp_path / "a.tsv", tsv(ROWS))
    data = load_samples(f"text:{path}", vocabulary_size=300, max_length=5)
    assert data.vocabulary_size <= 300
    assert data.input_shape == (5,)
    assert data.train.x.shape[1] == 5
    with pytest.raises(ValueError, match="vocabulary of 257 tokens"):
        load_samples(f"text:{path}", vocabulary_size=257)
    with pytest.raises(ValueError, match="length of 0 tokens"):
        load_samples(f"text:{path}", max_length=0)


PROSE = [(i % 2, f"the {WORDS[i % 6]} is not the {WORDS[i * 5 % 7]}, it is {WORDS[i % 5]}.") for i in range(40)]


def test_words_are_tokens_and_others_are_unknown(tmp_path):
    write(tmp_path / "train.tsv", tsv(PROSE))
    write(tmp_path / "test.tsv", tsv([(0, "The zebra, isn't it?"), (1, "☃")]))
    data = load_samples(f"text:{tmp_path}", val_fraction=0)
    words = data.preparation.tokenizer.get_vocab()
    assert {"the", "not", "ünder", ",", "."} <= words.keys() and len(words) == data.vocabulary_size < 20
    encoded = [words.get(word, 1) for word in ("the", "zebra", ",", "isn", "'", "t", "it", "?")]
    assert encoded.count(1) == 5
    assert data.test.x[0, : len(encoded)].tolist() == encoded
    assert data.test.x[1].tolist() == [1] + [0] * (data.input_shape[0] - 1)
    few = load_samples(f"text:{tmp_path}", val_fraction=0, vocabulary_size=5).preparation.tokenizer.get_vocab()
    assert len(few) == 5 and {"[PAD]", "[UNK]", "the", "is"} <= few.keys()


def test_tokens_are_pairs_where_many_words_would_be_unknown(tmp_path):
    """As in a script that does not part words by spaces, or where each text has words of its own."""
    for rows, are_words in ((PROSE, True), ([(i % 2, f"日本{i}の川と山{i * 7}") for i in range(40)], False)):
        path = write(tmp_path / "a.tsv", tsv(rows))
        auto = load_samples(f"text:{path}")
        for tokens, is_same in (("words", are_words), ("pairs", not are_words)):
            said = load_samples(f"text:{path}", tokens=tokens)
            assert (said.preparation.to_json() == auto.preparation.to_json()) is is_same
    with pytest.raises(ValueError, match="tokens 'letters' are not known; choose one of auto, words, pairs"):
        load_samples(f"text:{path}", tokens="letters")
    with pytest.raises(ValueError, match="a vocabulary of 2 tokens; it holds padding, unknown and a word"):
        load_samples(f"text:{path}", tokens="words", vocabulary_size=2)


def test_another_process_learns_the_same_tokens(tmp_path):
    """Pairs and words, under other hashes of strings than here."""
    paths = [str(write(tmp_path / f"{name}.tsv", tsv(rows))) for name, rows in (("pairs", ROWS), ("words", PROSE))]
    script = (
        "import json, sys; from nugnn.datasets.samples import load_samples;"
        "found = [load_samples(f'text:{path}') for path in sys.argv[1:]];"
        "print(json.dumps([[d.preparation.to_json(), d.train.x.tolist()] for d in found]))"
    )
    another = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script, *paths],
        env={**os.environ, "PYTHONHASHSEED": another},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [load_samples(f"text:{path}") for path in paths]
    expected = [[data.preparation.to_json(), data.train.x.tolist()] for data in here]
    assert done.stdout == json.dumps(expected) + "\n"


@pytest.mark.parametrize("tokens", ["pairs", "words"])
def test_a_saved_preparation_encodes_further_texts_alike(tmp_path, tokens):
    data = load_samples(f"text:{write(tmp_path / 'a.tsv', tsv(ROWS))}", tokens=tokens)
    data.save_preparation(tmp_path / "samples.json")
    saved = load_preparation(tmp_path / "samples.json")
    texts = ["Blue cat 日本", "something unseen ☃", "\u200b", "\u200b "]
    assert torch.equal(saved.encoder.encode(texts), data.preparation.encode(texts))
    assert (saved.encoder.encode(texts) != 0).any(1).all()
    assert (saved.kind, saved.class_names, saved.input_shape) == ("text", data.class_names, data.input_shape)
    again = pickle.loads(pickle.dumps(data.preparation))
    assert torch.equal(again.encode(texts), data.preparation.encode(texts))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"kind": "sound", "class_names": [], "input_shape": []}',
        b'{"kind": "text", "class_names": [], "input_shape": [], "preparation": {"tokenizer": {}, "max_length": 1}}',
        b'{"kind": "table", "class_names": [], "input_shape": [], "preparation": {"columns": [{"name": "a"}]}}',
    ],
)
def test_other_files_are_no_preparation(tmp_path, content):
    path = write(tmp_path / "samples.json", content)
    with pytest.raises(ValueError, match=r"samples.json is no preparation of samples"):
        load_preparation(path)


def test_quotes_mean_nothing_and_line_ends_and_marks_do_not_matter(tmp_path):
    rows = [(i % 2, f'he said "no {i} \u2028 maybe') for i in range(20)]
    plain = load_samples(f"text:{write(tmp_path / 'a.tsv', tsv(rows))}")
    variants = {
        "bom.tsv": b"\xef\xbb\xbf" + tsv(rows).encode(),
        "crlf.tsv": tsv(rows).replace("\n", "\r\n").encode(),
        "no-end.tsv": tsv(rows).rstrip("\n").encode(),
        "blank-end.tsv": tsv(rows).encode() + b"\n\r\n",
        "other.tsv.gz": gzip.compress(tsv(rows).encode()),
        "turned.tsv": "".join(
            f"{line}\n" for line in ["Text\t_id\tLabel", *(f"{text}\t7\t{label}" for label, text in rows)]
        ).encode(),
    }
    for name, content in variants.items():
        data = load_samples(f"text:{write(tmp_path / name, content)}")
        assert torch.equal(data.train.x, plain.train.x), name
        assert torch.equal(data.test.labels, plain.test.labels), name


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b"label\ttext\n", "no samples below"),
        ("label,text\n1,a\n", "separated by commas"),
        ("label;text\n1;a\n", "separated by semicolons"),
        ("label    text\n1    a\n", "separated by blanks"),
        ("lab\ttext\n1\ta\n", "no column 'label'"),
        ("label\ttext\ttext\n1\ta\tb\n", "more than one column 'text'"),
        ("label\ttext\tsource\n1\ta\tb\n", "column 'source' has no meaning"),
        ("label\ttext\n1\ta\n1 a\n", "line 3 has 1 cells, the header has 2"),
        ("label\ttext\n1\ta\tb\n", "line 2 has 3 cells"),
        ("label\ttext\n1\ta\n\n0\tb\n", "line 3 is blank"),
        ("label\ttext\n1\ta\n\tb\n", "line 3: the label is empty"),
        ("label\ttext\n1\t \n0\tb\n", "line 2: the text is empty"),
        ("label\ttext\n1\ta\n1.5\tb\n", "line 3: the label '1.5' is a number with a fraction"),
        ("label\ttext\r1\ta\r", "carriage return alone"),
        (b"label\ttext\n1\ta\n0\t\xff\xfe\n", "line 3 is not UTF-8"),
        (b"label\ttext\n1\ta\0\n", "line 2 holds a zero byte"),
        ("label\ttext\n1\ta\n".encode("utf-16"), "UTF-16"),
        (b"<html><body>no such file</body></html>", "web page"),
        (b"\x1f\x8b\x08\x00", "UTF-8|zero byte"),
    ],
)
def test_broken_files_are_refused_by_line(tmp_path, content, problem):
    path = write(tmp_path / "a.tsv", content)
    with pytest.raises(ValueError, match=problem) as caught:
        load_samples(f"text:{path}")
    assert str(path) in str(caught.value)


def test_parts_of_a_folder(tmp_path):
    write(tmp_path / "train.tsv", tsv(ROWS))
    write(tmp_path / "dev.tsv", tsv(ROWS[:6]))
    write(tmp_path / "test.tsv", tsv(ROWS[:9]))
    write(tmp_path / "dev_out_of_domain.tsv", tsv(ROWS[:9]))
    assert [len(part) for _, part in load_samples(f"text:{tmp_path}").parts] == [60, 6, 9]
    write(tmp_path / "test.tsv", tsv([(0, "a"), (9, "b")]))
    with pytest.raises(ValueError, match=r"test.tsv: line 3: no training sample has the label '9'"):
        load_samples(f"text:{tmp_path}")
    write(tmp_path / "val.tsv", tsv(ROWS[:6]))
    with pytest.raises(ValueError, match=r"dev.tsv and val.tsv are the same part"):
        load_samples(f"text:{tmp_path}")
    with pytest.raises(ValueError, match=r"train.tsv is not in it"):
        load_samples(f"text:{write(tmp_path / 'b' / 'test.tsv', tsv(ROWS)).parent}")


def test_processes_forked_after_learning_encode_and_are_not_warned(tmp_path):
    path = write(tmp_path / "a.tsv", tsv(ROWS))
    script = (
        "import os, sys; from nugnn.datasets.samples import load_samples; d = load_samples(sys.argv[1]);"
        "child = os.fork(); child or (d.preparation.encode(['a b']), os._exit(0)); print(os.waitpid(child, 0)[1])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, f"text:{path}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_without_the_library_the_error_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tsv", tsv(ROWS))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"nugnn\[text\]"):
        load_samples(f"text:{path}")
