"""A checkpoint becomes visible in one step, and only when all of it is on the disk.

    root/step-40/                    complete; nothing else has such a name
    root/latest                      "step-40", moved after it
    root/.latest.1f0c                what `latest` will be, from before the step has its name until then
    root/.step-40.1f0c.tmp/          being written, or left by a job that died
    root/.step-40.1f0c.old/          replaced; counts as step 40 until its successor is in place
    root/.step-40.1f0c.gone/         being deleted
    root/.step-40.1f0c.new/          a .tmp folder that nobody holds yet

Every writing job has a name of its own in the middle, so that two of them never write into one folder. Rank 0 holds a
lock on its `.tmp` folder, which ends with the process, however it ends: what nobody holds was left, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fullshard.core.ckpt.manifest import Manifest
from fullshard.errors import CheckpointError, CheckpointExistsError
from fullshard.runtime.checkpoint.files.folder import MANIFEST_FILE, manifest_bytes, read_manifest
from fullshard.runtime.checkpoint.files.reading import open_regular
from fullshard.runtime.checkpoint.files.writing import advice_on

LATEST_FILE = "latest"
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})", re.ASCII)
_POINTER = re.compile(rf"\.{LATEST_FILE}\.([0-9a-f]+)", re.ASCII)
_HIDDEN = re.compile(r"\.(step-(?:0|[1-9]\d{0,17}))\.([0-9a-f]+)\.(new|tmp|old|gone)", re.ASCII)
_TOLD = 20  # steps in an error
MAX_STEP = 10**18  # as many digits as a folder's name may have
_LOG = logging.getLogger("fullshard")
# Where a file system has no locks: after this long without a change a folder is taken for left.
_ABANDONED_SECONDS = 24 * 3600.0


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step}"


class Draft:
    """The folder that a checkpoint is written in. One rank begins and publishes it; all write into it.

    Args:
        root: Where checkpoints are; made if there is nothing.
        step: Optimizer steps done.
        overwrite: Replace a checkpoint of this step.

    Attributes:
        path: The folder to write in.

    Raises:
        CheckpointExistsError: There is a checkpoint of this step, and it is not to be replaced.
        CheckpointError: The folder cannot be made.
    """

    def __init__(self, root: Path, step: int, overwrite: bool) -> None:
        self._root = root
        self._final = root / step_name(step)
        self._overwrite = overwrite
        self._nonce = secrets.token_hex(8)
        self.path = self._hidden("tmp")
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            self._refuse_existing()
            self._lock = _make_locked(self._hidden("new"), self.path)
        except CheckpointError:
            raise
        except OSError as error:
            what = f"cannot begin a checkpoint in {root}: {error.strerror or error}.{advice_on(error)}"
            raise CheckpointError(what) from error

    def publish(self, manifest: Manifest) -> Path:
        """Make the checkpoint visible, then move `latest` to it. All files of ranks are on the disk by now.

        Raises:
            CheckpointExistsError: Another job has published this step meanwhile.
            CheckpointError: The disk refuses.
        """
        try:
            _write_durably(self.path / MANIFEST_FILE, manifest_bytes(manifest))
            sync_folder(self.path)
            # First: who dies between the two renames has told by this that the new checkpoint is the latest one.
            # Renamed into its place: an empty one would be taken for what a job has left.
            prepared = self.path / LATEST_FILE
            _write_durably(prepared, f"{self._final.name}\n".encode())
            prepared.rename(self._pointer)
            self._rename()
            sync_folder(self._root)
            with suppress(FileNotFoundError):  # another job, which took this one for dead, has done it
                self._pointer.replace(self._root / LATEST_FILE)
            sync_folder(self._root)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot publish {self._final}: {error.strerror or error}") from error
        finally:
            self._release()
        shutil.rmtree(self._hidden("old"), ignore_errors=True)
        return self._final

    def abandon(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self._pointer.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    @property
    def _pointer(self) -> Path:
        return self._root / f".{LATEST_FILE}.{self._nonce}"

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _rename(self) -> None:
        if self._overwrite and self._final.exists():
            self._final.rename(self._hidden("old"))  # not deleted yet: it may be the only checkpoint there is
        try:
            self.path.rename(self._final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                self._refuse_existing(late=True)
            raise

    def _refuse_existing(self, late: bool = False) -> None:
        if late or (self._final.exists() and not self._overwrite):
            raise CheckpointExistsError(
                f"{self._final} exists{' by now: another job saves to the same place' if late else ''}. Save another "
                "step or to another folder, or ask for overwrite=True"
            )

    def _hidden(self, kind: str) -> Path:
        return self._root / f".{self._final.name}.{self._nonce}.{kind}"


def steps(root: Path) -> dict[int, Path]:
    """Folders that have the name of a complete checkpoint, by step; also replaced ones without a successor."""
    found: dict[int, Path] = {}
    for path in _folders(root):  # hidden names come first, so that a successor counts
        hidden, plain = _HIDDEN.fullmatch(path.name), _STEP.fullmatch(path.name)
        if plain is not None:
            found[int(plain[1])] = path
        elif hidden is not None and hidden[3] == "old":
            found[int(hidden[1].removeprefix("step-"))] = path
    return found


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder: the one that `latest` names, else the one of the highest step.

    Folders whose manifest is missing or damaged are never taken; each gets a warning in the log "fullshard".

    Returns:
        Its folder, or None if there is none.
    """
    found = steps(Path(root))
    named = named_step(Path(root))
    for step in sorted(found, key=lambda step: (step == named, step), reverse=True):
        try:
            read_manifest(found[step])
        except CheckpointError as error:
            _LOG.warning("checkpoint %s is not used: %s", found[step], error)
        else:
            if named is not None and step != named:
                _LOG.warning("%s names step %d, which is no checkpoint; taking step %d", root, named, step)
            return found[step]
    return None


def find(path: Path) -> Path:
    """The folder of a checkpoint: `path` itself, or the newest complete one in it.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST_FILE).exists():
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"no complete checkpoint in {path.absolute()}: {_instead(path)}")
    return found


def _instead(path: Path) -> str:
    """What there is where no checkpoint is."""
    if not path.exists():
        near = sorted(steps(path.parent)) if path.parent.is_dir() else []
        told = ", ".join([*(["..."] if near[:-_TOLD] else []), *map(str, near[-_TOLD:])])
        return "there is no such folder" + (f"; {path.parent.absolute()} has steps {told}" if near else "")
    if path.is_file():
        return "it is a file, which `fullshard ckpt import` may make a checkpoint of"
    forms = {"dcp": ".metadata", "hf": "*.safetensors"}
    form = next((form for form, pattern in forms.items() if next(path.glob(pattern), None)), None)
    if form is not None:
        command = f"fullshard ckpt import {shlex.quote(str(path))} OUT --from {form}"
        return f"its files look as if `{command}` could make a checkpoint of them"
    return f"it has no {MANIFEST_FILE}, and no step-N in it has"


def prune(root: Path, keep: int) -> None:
    """Delete all but the checkpoints of the `keep` highest steps, and the one that `latest` names."""
    found = steps(root)
    named = named_step(root)
    for step in sorted(found)[:-keep]:
        if step != named:
            path = found[step]
            doomed = root / f".{step_name(step)}.{secrets.token_hex(8)}.gone"
            try:
                # Deleting takes many steps; a kill in between must not leave half a folder with a valid name.
                path.rename(doomed)
            except FileNotFoundError:  # another job was faster
                continue
            shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what jobs have left that are not alive any more, and put back what they were about to replace."""
    for path in list(_folders(root)):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden is None:
            continue
        name, nonce, kind = hidden.groups()
        owner = root / f".{name}.{nonce}.tmp"
        # A "new" one is not locked yet, for a moment.
        if _in_use(path if kind == "tmp" else owner) or (kind == "new" and _age(path) < _ABANDONED_SECONDS):
            continue
        if kind == "old" and not (root / name).exists():
            with suppress(OSError):
                path.rename(root / name)
            continue
        if kind == "tmp":  # it was not published, so its pointer must not count for an older checkpoint of the step
            (root / f".{LATEST_FILE}.{nonce}").unlink(missing_ok=True)
        _LOG.info("removing %s, which an interrupted job has left", path)
        shutil.rmtree(path, ignore_errors=True)
    for pointer, name, nonce in _pointers(root):
        # Asked once: a job that is alive may publish, and move its pointer itself, at any moment.
        if (root / f".{name}.{nonce}.tmp").exists():
            continue
        with suppress(FileNotFoundError):
            if (root / name).is_dir():
                pointer.replace(root / LATEST_FILE)
            else:
                pointer.unlink()


def _pointers(root: Path) -> list[tuple[Path, str, str]]:
    """(file, name of the step, name of the job) of what `latest` shall become, oldest first."""
    found = [(path, match[1]) for path in root.glob(f".{LATEST_FILE}.*") if (match := _POINTER.fullmatch(path.name))]
    found.sort(key=lambda item: -_age(item[0]))
    return [(path, step_name(-1 if (step := _step_in(path)) is None else step), nonce) for path, nonce in found]


def _counts(root: Path, name: str, nonce: str) -> bool:
    """Whether the step that a pointer names has been published: its job has ended before it moved `latest`."""
    return (root / name).is_dir() and not (root / f".{name}.{nonce}.tmp").exists()


def leftovers(root: Path) -> Iterator[tuple[Path, bool]]:
    """Hidden folders of jobs, and whether one is writing there now."""
    for path in _folders(root):
        if _HIDDEN.fullmatch(path.name):
            yield path, _in_use(path)


def _make_locked(new: Path, final: Path) -> int:
    """Make a folder that appears under its final name only when this process holds its lock."""
    new.mkdir()
    lock = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_EX)  # nobody holds it for longer than it takes to ask
    new.rename(final)
    return lock


def _age(path: Path) -> float:
    """Seconds since something in a folder changed; 0 if it is gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _in_use(folder: Path) -> bool:
    """Whether a process that lives holds the lock of a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return _age(folder) < _ABANDONED_SECONDS
    else:
        return False
    finally:
        os.close(handle)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def named_step(root: Path) -> int | None:
    """The step that `latest` names, or is about to, if it can be read."""
    for pointer, name, nonce in reversed(_pointers(root)):
        if _counts(root, name, nonce):
            return _step_in(pointer)
    return _step_in(root / LATEST_FILE)


def _step_in(path: Path) -> int | None:
    try:
        file, _ = open_regular(path)
    except CheckpointError:
        return None
    with os.fdopen(file, "rb") as opened:
        found = _STEP.fullmatch(opened.read(64).decode("ascii", "replace").strip())
    return None if found is None else int(found[1])


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Ask the disk to keep the entries of a folder; without it a power cut can take a renamed one back."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
