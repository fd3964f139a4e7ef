"""Corpus and windows: the split, who reads what, and exact places."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from fullshard.train.config import DataConfig
from fullshard.train.corpus import TRAIN_FILE, build_corpus, find_files, open_corpus
from fullshard.train.errors import DataError
from fullshard.train.windows import IGNORED_LABEL, TrainStream, ValidationWindows


def make_files(folder: Path, count: int = 40, size: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"f{number:03d}.txt").write_text(f"{number:03d}" * size)
    return folder


def config(*paths: Path | str, **changes: object) -> DataConfig:
    return DataConfig(paths=tuple(map(str, paths)), **{"seq_len": 16, "validation_fraction": 0.3, **changes})  # type: ignore[arg-type]


def stream(
    rank: int, ranks: int, text: bytes = bytes(range(256)) * 4, batch: int = 2, windows: int | None = None
) -> TrainStream:
    step_windows = batch * ranks if windows is None else windows
    return TrainStream(np.frombuffer(text, dtype=np.uint8), 16, batch, rank, ranks, 5, step_windows)


# -- corpus ------------------------------------------------------------------------------------------------------------


def test_every_file_is_on_exactly_one_side_whatever_its_name(tmp_path: Path) -> None:
    def sides(folder: Path, name: str) -> tuple[set[bytes], set[bytes]]:
        build_corpus(config(folder), tmp_path / name)
        corpus = open_corpus(tmp_path / name)
        train, valid = (set(part.tobytes().split(b"\0")) - {b""} for part in (corpus.train, corpus.valid))
        return train, valid

    folder = make_files(tmp_path / "text")
    train, valid = sides(folder, "a")
    assert len(train) + len(valid) == 40
    assert not train & valid
    assert 4 <= len(valid) <= 20  # 12 expected
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"renamed{99 - number}.txt")
    (folder / "copy.txt").write_bytes((folder / "renamed70.txt").read_bytes())
    assert sides(folder, "b") == (train, valid)


def test_one_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "one.log"  # named directly: its suffix does not matter
    path.write_bytes(bytes(range(1, 201)))
    build_corpus(config(path), tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.train.tobytes() + corpus.valid.tobytes() == path.read_bytes() + b"\0"
    assert len(corpus.train) == int(201 * 0.7)


def test_folders_globs_and_files_are_found_once_and_skipped_folders_are_not(tmp_path: Path) -> None:
    make_files(tmp_path / "a", 3)
    make_files(tmp_path / "a" / "tests", 2)
    make_files(tmp_path / "a" / ".git", 2)
    (tmp_path / "a" / "x.bin").write_bytes(b"x")
    found = find_files(config(tmp_path / "a", tmp_path / "a" / "f001.txt", f"{tmp_path}/a/f*.txt"))
    assert [path.name for path in found] == ["f000.txt", "f001.txt", "f002.txt"]


def test_standard_library_is_a_corpus() -> None:
    names = {path.name for path in find_files(DataConfig())}
    assert {"argparse.py", "typing.py"} <= names
    assert not {"test_argparse.py"} & names


def test_max_bytes_limits_the_text(tmp_path: Path) -> None:
    build_corpus(config(make_files(tmp_path / "t"), max_bytes=1000), tmp_path / "c")
    corpus = open_corpus(tmp_path / "c")
    texts = [text for part in (corpus.train, corpus.valid) for text in part.tobytes().split(b"\0")]
    assert sum(map(len, texts)) == 1000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothere", "there is no file or folder 'nothere'"),
        ("nothere/*.py", "matches nothing"),
        ("{tmp}/binary", r"no file that ends in .*It holds files that end in \.bin"),
        ("{tmp}/hollow", "the corpus is empty: 1 file found"),
        ("{tmp}/short", "shorter than one window"),
    ],
)
def test_unusable_corpus_is_an_error_that_helps(tmp_path: Path, path: str, message: str) -> None:
    for folder, name, text in (("binary", "a.bin", b"x" * 99), ("hollow", "a.txt", b""), ("short", "a.txt", b"x" * 20)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(text)
    with pytest.raises(DataError, match=message):
        build_corpus(config(path.format(tmp=tmp_path)), tmp_path / "corpus")


def test_damaged_corpus_is_an_error(tmp_path: Path) -> None:
    build_corpus(config(make_files(tmp_path / "t")), tmp_path / "c")
    with (tmp_path / "c" / TRAIN_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="is damaged"):
        open_corpus(tmp_path / "c")
    with pytest.raises(DataError, match="file system that all ranks share"):
        open_corpus(tmp_path / "elsewhere")


# -- windows -----------------------------------------------------------------------------------------------------------


def test_ranks_read_disjoint_windows_that_cover_the_epoch() -> None:
    ranks = 3
    streams = [stream(rank, ranks, batch=5) for rank in range(ranks)]
    windows = streams[0].windows
    seen: list[int] = []
    position = 0
    while position + 5 * ranks <= windows:
        for one in streams:
            seen += chain(*one.indices(position))
        position = streams[0].next_position(position)
    assert len(seen) == len(set(seen)) == position
    assert {start % 16 for start in seen} == {seen[0] % 16}  # one shift for the epoch: no two windows overlap
    assert windows == 62


def test_position_restores_the_place_exactly() -> None:
    whole, position = [], 0
    for _ in range(40):  # more than one epoch
        whole.append(stream(1, 2).indices(position))
        position = stream(1, 2).next_position(position)
    resumed, position = [], 13 * 4
    for _ in range(27):
        resumed.append(stream(1, 2).indices(position))
        position = stream(1, 2).next_position(position)
    assert resumed == whole[13:]


def test_epochs_differ_in_order_and_in_shift() -> None:
    one = stream(0, 1)
    epochs = [[one._start(epoch * one.windows + place) for place in range(one.windows)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({min(epoch) for epoch in epochs}) > 1


def test_labels_are_the_next_bytes() -> None:
    (batch,) = stream(0, 1).step(0)
    assert batch.tokens.shape == batch.labels.shape == (2, 16)
    assert ((batch.tokens + 1) % 256).equal(batch.labels)


def test_marking_labels_never_changes_tokens() -> None:
    (batch,) = stream(0, 1, batch=1).step(0)
    batch.labels[:] = IGNORED_LABEL
    assert (batch.tokens >= 0).all()


def step_in_order(ranks: int, batch: int, windows: int, position: int) -> list[int]:
    """Start bytes of all ranks' windows in one step, in the order of the stream."""
    of_ranks = [stream(rank, ranks, batch=batch, windows=windows).indices(position) for rank in range(ranks)]
    return list(chain(*(chain(*micro) for micro in zip(*of_ranks, strict=True))))


def test_windows_after_resuming_with_other_ranks_are_those_of_the_uninterrupted_run() -> None:
    """B114, elastic: whoever computes them, the same windows in the same order, also where they do not divide."""
    windows, seen, position = 10, [], 0
    for ranks, batch in ((4, 2), (3, 2), (2, 3), (1, 8), (5, 16)):
        for _ in range(3):  # 15 steps of 10 in epochs of 62
            seen.append(step_in_order(ranks, batch, windows, position))
            position += windows
    alone = stream(0, 1, batch=windows)
    assert seen == [alone.indices(number * windows)[0] for number in range(15)]


@pytest.mark.parametrize(("ranks", "batch", "windows"), [(3, 2, 16), (4, 2, 16), (3, 4, 7), (4, 1, 2)], ids=str)
def test_places_that_are_left_in_a_step_do_not_count(ranks: int, batch: int, windows: int) -> None:
    of_ranks = [stream(rank, ranks, batch=batch, windows=windows).step(0) for rank in range(ranks)]
    assert {len(batches) for batches in of_ranks} == {-(-windows // (ranks * batch))}
    labels = [each.labels for batches in of_ranks for each in batches]
    assert {each.shape for each in labels} == {(batch, 16)}
    rows = [row for each in labels for row in each]
    assert sum(bool((row != IGNORED_LABEL).all()) for row in rows) == windows
    assert sum(bool((row == IGNORED_LABEL).all()) for row in rows) == len(rows) - windows


def test_text_smaller_than_one_batch_is_an_error() -> None:
    with pytest.raises(DataError, match=r"has 62 windows of 16 bytes, but one .* takes 64\."):
        stream(0, 2, batch=32)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_validation_counts_every_window_once_with_equal_batches_on_all_ranks(ranks: int, limit: int) -> None:
    text = np.frombuffer(bytes(range(256)), dtype=np.uint8)
    views = [ValidationWindows(text, 16, 2, rank, ranks, limit) for rank in range(ranks)]
    batches = [view.batches() for view in views]
    assert len({len(each) for each in batches}) == 1
    counted = [
        tuple(row.tolist())
        for each in batches
        for batch in each
        for row in batch.labels
        if (row != IGNORED_LABEL).all()
    ]
    assert len(counted) == len(set(counted)) == views[0].count == min(limit, 15)
    if ranks == 1:
        return
    alone = ValidationWindows(text, 16, 2, 0, 1, limit).batches()
    assert set(counted) == {
        tuple(row.tolist()) for batch in alone for row in batch.labels if (row != IGNORED_LABEL).all()
    }
