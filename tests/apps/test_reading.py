"""What the applications read: text, pieces of files, SVMlight's format."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiverso.apps import reading
from multiverso.apps.work import start


def test_sentences_end_at_stops_and_empty_lines() -> None:
    found = list(reading.sentences_of(["It's a Test. Of 2 words:\nhéllo\n\nand e.g. this", "next"]))
    assert found == [["it's", "a", "test"], ["of", "words", "héllo"], ["and", "e", "g"], ["this"], ["next"]]


def test_every_python_has_text() -> None:
    words = {word for sentence in reading.sentences_of([next(reading.python_texts())]) for word in sentence}
    assert len(words) > 20


def test_a_folder_s_text_is_read_and_the_rest_left(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("one")
    (tmp_path / "two.md").write_text("two")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    assert list(reading.texts_of(tmp_path)) == ["one", "two"]
    with pytest.raises(FileNotFoundError, match="no text"):
        list(reading.texts_of(tmp_path / "picture.png"))


def test_a_word_s_key_is_the_same_everywhere() -> None:
    assert reading.key_of("word") == -7669973388465560502
    assert len({reading.key_of(f"word{i}") for i in range(1000)}) == 1000


@settings(max_examples=60)
@given(st.lists(st.text("ab\n", max_size=9), max_size=8), st.integers(1, 12))
def test_each_line_is_in_one_piece(lines: list[str], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        content = "\n".join(lines)
        source = Path(folder) / "text.txt"
        source.write_text(content)
        if not content:
            with pytest.raises(FileNotFoundError):
                reading.write_pieces(Path(folder) / "list", source, size)
            return
        reading.write_pieces(Path(folder) / "list", source, size)
        parts = [piece.lines().decode() for piece in reading.read_pieces(Path(folder) / "list")]
        assert "".join(parts) == content
        assert all(part.endswith("\n") for part in parts if part and part is not [p for p in parts if p][-1])


def test_samples_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import dump_svmlight_file, load_svmlight_file

    random = np.random.default_rng(0)
    dense = np.where(random.random((50, 30)) < 0.2, random.normal(size=(50, 30)), 0)
    labels = np.where(random.random(50) < 0.5, -1, 1)
    file = io.BytesIO()
    dump_svmlight_file(dense, labels, file, zero_based=False)
    written = file.getvalue() + b"\n+1 qid:7 3:0.5 # a comment 1:2\n-1\n"
    matrix, expected = load_svmlight_file(io.BytesIO(written), n_features=30)
    samples = reading.parse_samples(written)
    assert np.array_equal(samples.labels, expected)
    ours = np.zeros((len(samples), 30))
    ours[samples.sample_of(), samples.ids - 1] = samples.values
    assert np.array_equal(ours, matrix.toarray())
    part = samples.part(10, 20)
    assert np.array_equal(ours[10:20][part.sample_of(), part.ids - 1], part.values)


@pytest.mark.parametrize(
    "wrong", [b"1 2:3 4", b"x 1:2", b"1 1:2:3", b"1 1.5:2", b"1 9007199254740993:1", b"1 a:2", b"\xff 1:2"]
)
def test_what_is_no_sample_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected|id"):
        reading.parse_samples(b"1 1:2\n" + wrong)


@pytest.mark.parametrize("raised, becomes", [(EOFError, EOFError), (KeyboardInterrupt, SystemExit)])
def test_a_file_that_ends_too_early_is_not_taken_for_ctrl_c(
    raised: type[BaseException], becomes: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def main() -> None:
        raise raised("no data left in file")

    monkeypatch.setattr(sys, "argv", ["word2vec"])
    with pytest.raises(becomes) as told:
        start(main)
    assert str(told.value) == ("no data left in file" if becomes is EOFError else "130")
