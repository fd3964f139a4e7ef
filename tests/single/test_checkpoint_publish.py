"""A checkpoint becomes visible at once or not at all, and what interrupted jobs leave is cleaned up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.core.ckpt.manifest import Manifest, file_name
from fullshard.errors import CheckpointError, CheckpointExistsError
from fullshard.runtime.checkpoint import publish
from fullshard.runtime.checkpoint.files.folder import Checkpoint
from fullshard.runtime.checkpoint.files.writing import write_file
from fullshard.runtime.checkpoint.publish import Draft, latest, leftovers, prune, remove_leftovers, steps


def save(root: Path, step: int, overwrite: bool = False, draft: Draft | None = None) -> Path:
    draft = draft or Draft(root, step, overwrite)
    file = write_file(draft.path / file_name(0), [])
    return draft.publish(Manifest(step, 1, (), {}, {}, (file,), {"by": draft.path.name}))


def writer(path: Path) -> str:
    with Checkpoint(path) as checkpoint:
        return str(checkpoint.manifest.state["by"])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def run_alone(code: str, *arguments: object) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=False, env=environment, timeout=60).returncode


def test_nothing_is_visible_before_all_of_it_is(tmp_path: Path) -> None:
    """B108."""
    root = tmp_path / "deep" / "root"
    assert latest(root) is None
    draft = Draft(root, 3, overwrite=False)
    assert latest(root) is None
    assert steps(root) == {}
    assert save(root, 3, draft=draft) == latest(root) == root / "step-3"
    assert names(root) == ["latest", "step-3"]
    save(root, 10)
    assert latest(root) == root / "step-10"


def test_an_abandoned_draft_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    draft = Draft(tmp_path, 2, overwrite=False)
    (draft.path / "half").write_text("x")
    draft.abandon()
    assert names(tmp_path) == ["latest", "step-1"]


def test_an_existing_step_is_replaced_only_on_request(tmp_path: Path) -> None:
    first = writer(save(tmp_path, 1))
    with pytest.raises(CheckpointExistsError, match="step-1 exists"):
        Draft(tmp_path, 1, overwrite=False)
    assert writer(tmp_path / "step-1") == first
    assert writer(save(tmp_path, 1, overwrite=True)) != first
    assert names(tmp_path) == ["latest", "step-1"]


def test_two_jobs_that_save_one_step_do_not_mix(tmp_path: Path) -> None:
    """The second to finish gets an error; the checkpoint is whole, of the first."""
    first, second = Draft(tmp_path, 1, overwrite=False), Draft(tmp_path, 1, overwrite=False)
    path = save(tmp_path, 1, draft=first)
    with pytest.raises(CheckpointExistsError, match="another job"):
        save(tmp_path, 1, draft=second)
    second.abandon()
    assert writer(path) == first.path.name
    assert names(tmp_path) == ["latest", "step-1"]


def test_a_live_job_keeps_its_draft_and_a_dead_one_does_not(tmp_path: Path) -> None:
    alive = Draft(tmp_path, 1, overwrite=False)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom fullshard.runtime.checkpoint.publish import Draft\n"
        "draft = Draft(Path(sys.argv[1]), 2, False)\n(draft.path / 'half').write_text('x')\nos.kill(os.getpid(), 9)"
    )
    assert run_alone(code, tmp_path) == -9
    assert sorted(in_use for _, in_use in leftovers(tmp_path)) == [False, True]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [alive.path.name]
    save(tmp_path, 1, draft=alive)
    assert names(tmp_path) == ["latest", "step-1"]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)"])
def test_a_save_in_the_background_is_finished_when_the_program_ends(tmp_path: Path, end: str) -> None:
    code = (
        "import sys, time, torch\nfrom fullshard import checkpoint\nfrom fullshard.runtime.checkpoint import saving\n"
        "write = saving.write_file\n"
        "saving.write_file = lambda *a: (time.sleep(0.3), write(*a))[1]\n"  # begins when the program is at its end
        f"checkpoint.async_save(sys.argv[1], {{'model': torch.nn.Linear(3, 3)}}, 1)\n{end}"
    )
    assert run_alone(code, tmp_path) == (3 if end else 0)
    with Checkpoint(tmp_path / "step-1") as checkpoint:
        checkpoint.check_file(0)


def test_a_checkpoint_whose_replacement_was_interrupted_comes_back(tmp_path: Path) -> None:
    first = writer(save(tmp_path, 1))
    (tmp_path / "step-1").rename(tmp_path / ".step-1.abc.old")  # killed here, before the new one took its name
    found = latest(tmp_path)
    assert found is not None
    assert writer(found) == first
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut may undo comes before what depends on it."""
    events: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda file: (events.append(Path(f"/proc/self/fd/{file}").readlink().name), sync(file))
    )
    monkeypatch.setattr(Path, "rename", lambda path, new: (events.append(f"-> {new.name}"), rename(path, new))[1])
    draft = Draft(tmp_path, 1, overwrite=False)
    folder = draft.path.name
    save(tmp_path, 1, draft=draft)
    named = events.index("-> step-1")
    assert [events.index(name) < named for name in (file_name(0), "manifest.json", folder)] == [True, True, True]
    assert max(events.index(name) for name in (file_name(0), "manifest.json")) < events.index(folder)
    assert tmp_path.name in events[named:]


def test_a_replacement_that_is_killed_between_its_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    first = writer(save(tmp_path, 1))
    rename = Path.rename

    def killed(path: Path, new: Path) -> Path:
        if new.name == "step-1":
            raise KilledError
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KilledError):
        save(tmp_path, 1, overwrite=True)
    monkeypatch.setattr(Path, "rename", rename)
    found = latest(tmp_path)
    assert found is not None
    assert writer(found) == first
    save(tmp_path, 2)
    assert writer(tmp_path / "step-1") == first


@pytest.mark.parametrize("moment", range(6))
def test_cleaning_up_at_any_moment_does_not_keep_latest_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Another job begins a save whenever publishing has made a file, still empty, or is about to make one durable."""
    save(tmp_path, 1)
    draft = Draft(tmp_path, 2, overwrite=False)
    sync, make, calls = os.fsync, Path.open, iter(range(100))

    def clean_up() -> None:
        if next(calls) == moment + 1:  # the file of the rank comes first
            monkeypatch.undo()
            remove_leftovers(tmp_path)

    def made(path: Path, *arguments: Any) -> Any:
        file = make(path, *arguments)
        clean_up()
        return file

    monkeypatch.setattr(os, "fsync", lambda file: (clean_up(), sync(file))[1])
    monkeypatch.setattr(Path, "open", made)
    save(tmp_path, 2, draft=draft)
    assert latest(tmp_path) == tmp_path / "step-2"
    assert (tmp_path / "latest").read_text() == "step-2\n"


@pytest.mark.parametrize("renamed", [False, True])
def test_an_interrupted_replacement_does_not_move_latest(tmp_path: Path, renamed: bool) -> None:
    for step in (60, 100):
        save(tmp_path, step)
    (tmp_path / ".step-60.abc.tmp").mkdir()  # of a job that was killed before the new one took its name
    (tmp_path / ".latest.abc").write_text("step-60\n")
    if renamed:
        (tmp_path / "step-60").rename(tmp_path / ".step-60.abc.old")
    remove_leftovers(tmp_path)
    assert latest(tmp_path) == tmp_path / "step-100"
    assert names(tmp_path) == ["latest", "step-100", "step-60"]


@pytest.mark.parametrize("text", ["step-3", "../elsewhere", "step-1/../..", "", "step-01", "\0"])
def test_latest_is_only_a_hint(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """B115: what it says is never a path."""
    save(tmp_path / "root", 1)
    save(tmp_path / "root", 2)
    save(tmp_path, 9).rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "latest").write_text(text)
    assert latest(tmp_path / "root") == tmp_path / "root" / "step-2"
    assert ("names step 3" in caplog.text) == (text == "step-3")


def test_a_damaged_manifest_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert latest(tmp_path) == tmp_path / "step-1"
    assert "step-2 is not used" in caplog.text


def test_the_highest_steps_and_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (5, 40, 30, 7):
        save(tmp_path, step)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step-30", "step-40", "step-7"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot begin a checkpoint in .*file"):
        Draft(tmp_path / "file", 1, overwrite=False)
    draft = Draft(tmp_path, 1, overwrite=False)
    monkeypatch.setattr(publish, "_write_durably", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CheckpointError, match=r"cannot publish .*step-1: No space left"):
        draft.publish(Manifest(1, 1, (), {}, {}, (), {}))
    draft.abandon()
    assert names(tmp_path) == ["file"]
