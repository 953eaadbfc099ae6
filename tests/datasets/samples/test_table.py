"""Tables: features by the training rows' statistics, words one-hot, and errors by line."""

import math

import numpy as np
import pytest
import torch

from nugnn.datasets.samples import load_preparation, load_samples


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(count=40, header="size,colour,_note,label", end="\n"):
    rows = [f"{i * 1.5},{('red', 'green', 'blue')[i % 3]},n{i},{('yes', 'no')[i % 2]}" for i in range(count)]
    return end.join([header, *rows, ""])


def test_numbers_are_standardised_and_words_one_hot_by_the_training_rows(tmp_path):
    data = load_samples(f"csv:{write(tmp_path / 'a.csv', table())}", seed=3)
    assert [len(part) for _, part in data.parts] == [28, 4, 8]
    assert (data.kind, data.input_shape, data.class_names) == ("table", (4,), ("no", "yes"))
    assert data.train.x.dtype == torch.float32
    sizes = data.train.x[:, 0].double()
    assert abs(sizes.mean()) < 28 * 2.0**-23  # each value is rounded to float32, below 2
    assert abs(sizes.std(correction=0) - 1) < 28 * 2.0**-23
    column, words = data.preparation.columns
    assert words.words == ("blue", "green", "red")
    raw = {i * 1.5: i for i in range(40)}
    seen = []
    for _, part in data.parts:
        for x, label in zip(part.x, part.labels.tolist(), strict=True):
            row = raw[min(raw, key=lambda size, x=x: abs(size - (float(x[0]) * column.deviation + column.mean)))]
            seen.append(row)
            assert x[1:].tolist() == [float(row % 3 == which) for which in (2, 1, 0)]
            assert label == (row + 1) % 2
    assert sorted(seen) == [*range(40)]


def test_statistics_are_of_the_training_rows_alone(tmp_path):
    write(tmp_path / "train.csv", "a,b,label\n1,x,0\n3,y,1\n")
    write(tmp_path / "test.csv", "a,b,label\n100,z,0\n2,x,1\n")
    data = load_samples(f"csv:{tmp_path}", val_fraction=0)
    assert data.train.x.tolist() == [[-1, 1, 0], [1, 0, 1]]
    assert data.test.x.tolist() == [[98, 0, 0], [0, 1, 0]]
    assert len(data.val) == 0


CONSTANT = "a,b,label\n7,1,0\n7,2,1\n"


def test_a_constant_column_becomes_zeros(tmp_path):
    data = load_samples(f"csv:{write(tmp_path / 'a.csv', CONSTANT)}")
    assert (data.train.x[:, 0] == 0).all()


def test_a_column_of_parts_divides_the_rows(tmp_path):
    rows = ["split,label,a", "train,0,1", "train,1,2", "Valid,0,3", "test,1,4", "train,1,5"]
    path = write(tmp_path / "a.csv", "\n".join(rows))
    data = load_samples(f"csv:{path}")
    assert [len(part) for _, part in data.parts] == [3, 1, 1]
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.input_shape == (1,)
    with pytest.raises(ValueError, match="leave the fractions"):
        load_samples(f"csv:{path}", val_fraction=0.1)
    write(path, "\n".join([*rows, "tset,1,5"]))
    with pytest.raises(ValueError, match=r"line 7, column 'split' is 'tset'; allowed are train, val and test"):
        load_samples(f"csv:{path}")


def test_the_last_column_holds_the_labels_unless_one_is_called_so(tmp_path):
    last = load_samples(f"csv:{write(tmp_path / 'a.csv', table(header='size,colour,_note,answer'))}")
    named = load_samples(f"csv:{write(tmp_path / 'b.csv', table())}")
    assert torch.equal(last.train.x, named.train.x)
    assert torch.equal(last.train.labels, named.train.labels)
    first = "\n".join(["Label,a", *(f"{i % 2},{i}" for i in range(20))])
    assert load_samples(f"csv:{write(tmp_path / 'c.csv', first)}").class_names == ("0", "1")


@pytest.mark.parametrize("variant", ["bom", "crlf", "no end", "quotes", "blank lines", "spaces"])
def test_ways_to_write_a_file_do_not_matter(tmp_path, variant):
    plain = load_samples(f"csv:{write(tmp_path / 'a.csv', table())}")
    content = {
        "bom": "\ufeff" + table(),
        "crlf": table(end="\r\n"),
        "no end": table().rstrip("\n"),
        "quotes": table().replace("red", '"red"').replace("size", '"size"'),
        "blank lines": table().replace("\n", "\n\n"),
        "spaces": table().replace(",", " , "),
    }[variant]
    data = load_samples(f"csv:{write(tmp_path / 'b.csv', content)}")
    for (_, one), (_, other) in zip(plain.parts, data.parts, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.labels, other.labels)


def test_a_saved_preparation_encodes_further_rows_alike(tmp_path):
    data = load_samples(f"csv:{write(tmp_path / 'a.csv', table())}")
    data.save_preparation(tmp_path / "samples.json")
    saved = load_preparation(tmp_path / "samples.json")
    cells = {"size": np.array([0.0, 1e3]), "colour": np.array(["red", "violet"], dtype=object)}
    assert saved.encoder == data.preparation
    assert torch.equal(saved.encoder.encode(cells), data.preparation.encode(cells))
    with pytest.raises(ValueError, match="'colour' is missing"):
        saved.encoder.encode({"size": cells["size"]})
    with pytest.raises(ValueError, match="'size' held numbers"):
        saved.encoder.encode({"size": cells["colour"], "colour": cells["colour"]})


def test_large_numbers_neither_overflow_nor_pass_unnoticed(tmp_path):
    rows = "\n".join(["a,label", *(f"{sign}1e308,{i % 2}" for i, sign in enumerate(["", "-"] * 10))])
    data = load_samples(f"csv:{write(tmp_path / 'a.csv', rows)}")
    assert torch.isfinite(data.train.x).all()
    assert data.train.x.abs().max() < 2
    write(tmp_path / "train.csv", "a,label\n1,0\n2,1\n")
    write(tmp_path / "test.csv", "a,label\n1e300,0\n")
    with pytest.raises(ValueError, match=r"column 'a' has the value 1e.300 .* beyond float32"):
        load_samples(f"csv:{tmp_path}")


@pytest.mark.parametrize("ways", [("+1", "2"), (".5", "1."), ("1e3", "-1E-3"), ("007", "8")])
def test_numbers_in_any_writing(tmp_path, ways):
    path = write(tmp_path / "a.csv", "a,label\n" + "".join(f"{ways[i % 2]},{i % 2}\n" for i in range(10)))
    data = load_samples(f"csv:{path}", val_fraction=0, test_fraction=0)
    (column,) = data.preparation.columns
    assert column.mean == np.mean([float(ways[i % 2]) for i in range(10)])


HEAD = "a,b,label\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "first row is empty"),
        (HEAD, "no rows below"),
        ("a;b;label\n1;2;0\n", "semicolons|';'"),
        ("a\tb\tlabel\n1\t2\t0\n", r"tabs|'\\t'"),
        ("label\n1\n0\n", "one cell|no column to learn from"),
        ("_a,label\n1,1\n1,0\n", "no column to learn from"),
        ("_a,_b\n1,1\n", "leaves them out"),
        (HEAD + "1,2,0\n\n1,,1\n", "line 4, column 'b' is empty"),
        (HEAD + "1,2,0\n1,NA,1\n", "line 3, column 'b' is 'NA', which stands for a missing value"),
        (HEAD + "1,2,0\n1,nan,1\n", "line 3, column 'b' is 'nan'"),
        (HEAD + "1,2,0\n1,?,1\n", r"line 3, column 'b' is '\?'"),
        (HEAD + "1,2,0\n1,inf,1\n", "line 3, column 'b' is 'inf'; give a finite number"),
        (HEAD + "1,2,0\n1,1e999,1\n", "line 3, column 'b' is '1e999'; give a finite number"),
        (HEAD + "1,2,0\n1,two,1\n1,3,1\n", "line 3, column 'b' is 'two', and other rows have numbers"),
        (HEAD + "1,x,0\n1,2,1\n1,z,1\n", "line 3, column 'b' is '2', and other rows have words"),
        (HEAD + "1,2,0\n1,2\n", "row 3 has 2 cells, the header has 3"),
        (HEAD + "1,2,0\n1,2,3,4\n", "row 3 has 4 cells"),
        (HEAD + "1,2,0\n1,2,\n", "line 3: the label is empty"),
        (HEAD + "1,2,0\n1,2,0\n", "nothing can be learned"),
        (HEAD + "1,2,0.5\n1,2,1\n", "line 2: the label '0.5' is a number with a fraction"),
        (HEAD + "".join(f"1,w{i},{i % 2}\n" for i in range(150)), "one of 150 words; at most 100"),
        ("a,a,label\n1,2,0\n", "two columns are called 'a'"),
        ("a,Label,label\n1,2,0\n", "'Label' and 'label' mean the same"),
        (HEAD.encode() + b"1,\xff,0\n", "UTF|utf"),
        (HEAD.encode("utf-16"), "UTF-16"),
        (b"<!doctype html><p>,</p>", "web page"),
        ("split,a,label\nval,2,0\n", "no row has 'train'"),
    ],
)
def test_broken_files_are_refused_by_line(tmp_path, content, problem):
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(ValueError, match=problem) as caught:
        load_samples(f"csv:{path}")
    assert str(path) in str(caught.value) or "a:" in str(caught.value)


def test_parts_have_the_same_columns(tmp_path):
    write(tmp_path / "train.csv", "a,label\n1,0\n2,1\n")
    write(tmp_path / "test.csv", "b,label\n1,0\n2,1\n")
    with pytest.raises(ValueError, match=r"test.csv: the columns are b, label, and in train.csv a, label"):
        load_samples(f"csv:{tmp_path}")
    write(tmp_path / "train.csv", "a,split,label\n1,x,0\n2,y,1\n")
    write(tmp_path / "test.csv", "a,split,label\n1,x,0\n2,y,1\n")
    with pytest.raises(ValueError, match="leave one out"):
        load_samples(f"csv:{tmp_path}")
    write(tmp_path / "train.csv", "a,label\n1,0\n2,1\n")
    write(tmp_path / "test.csv", "a,label\n1,0\n\nx,1\n")
    with pytest.raises(ValueError, match=r"test.csv: line 4, column 'a' is 'x'"):
        load_samples(f"csv:{tmp_path}")


def test_deviation_is_that_of_the_values():
    from nugnn.datasets.samples.table_encoder import TableEncoder

    values = np.array([1.0, 2.0, 4.0, 9.0])
    (column,) = TableEncoder.learn({"a": values}, np.arange(4)).columns
    assert math.isclose(column.mean, 4.0, rel_tol=1e-15)
    assert math.isclose(column.deviation, math.sqrt((9 + 4 + 0 + 25) / 4), rel_tol=4e-16)
