"""Immutable bytes named by their sha256, and updates that arrive in pieces. What `put` has returned is on the disk."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NoReturn

from blocktrain.errors import Conflict, Damaged, StorageFailed
from blocktrain.files import sync_folder
from blocktrain.protocol.transfer import sha256

PIECE = 1 << 20
STRIPES = 64  # uploads that do not wait for each other
_NAME = re.compile(r"[0-9a-f]{64}\Z")


def is_name(name: str) -> bool:
    """Whether this is a blob's name; nothing else may reach a path."""
    return _NAME.match(name) is not None


class Blobs:
    """A folder ab/cd/abcd... with one file per blob, and one with the chunks of uploads that are not complete."""

    def __init__(self, folder: Path, on_failure: Callable[[str], object] = lambda _: None) -> None:
        self.folder = folder
        self._names = folder / "blobs"
        self._uploads = folder / "uploads"
        self._partial = folder / "partial"
        self._on_failure = on_failure
        self._uploading = [
            threading.RLock() for _ in range(STRIPES)
        ]  # chunks come from several threads, also twice
        self._durable: set[str] = set()  # folders that this process has made sure of
        try:
            shutil.rmtree(self._partial, ignore_errors=True)  # what a crash left half written
            for part in (self._names, self._uploads, self._partial):
                part.mkdir(parents=True, exist_ok=True)
            sync_folder(folder)
        except OSError as error:
            self._fail("prepare the blob folder", error)

    def path(self, name: str) -> Path:
        """Where a blob is, if it is there."""
        if not is_name(name):
            raise Conflict("a blob is named by the 64 hex digits of its sha256")
        return self._names / name[:2] / name[2:4] / name

    def has(self, name: str) -> bool:
        """Whether a blob is there; says nothing about its bytes."""
        return self.path(name).is_file()

    def size(self, name: str) -> int:
        """Length in bytes."""
        try:
            return self.path(name).stat().st_size
        except OSError:
            raise Damaged(
                f"the blob {name} is missing; restore it from a backup or a worker"
            ) from None

    def put(self, content: bytes) -> str:
        """Store bytes durably; the same bytes again are the same blob."""
        return self.put_stream([content], sha256(content))

    def put_stream(self, pieces: Iterable[bytes], name: str) -> str:
        """Store bytes that come in pieces (from memory or this disk), if they hash to the name; otherwise nothing remains."""
        target = self.path(name)
        digest = hashlib.sha256()
        partial: Path | None = None
        try:
            handle, written = tempfile.mkstemp(dir=self._partial)
            partial = Path(written)
            with os.fdopen(handle, "wb") as out:
                for piece in pieces:
                    digest.update(piece)
                    out.write(piece)
                if digest.hexdigest() != name:
                    raise Conflict(
                        f"the bytes hash to {digest.hexdigest()}, not to {name}: send them again"
                    )
                out.flush()
                os.fsync(out.fileno())
            self._make_folders(target.parent)
            partial.replace(target)  # also over an old copy: that one may have rotted
            sync_folder(target.parent)
        except OSError as error:
            self._fail(f"store the blob {name}", error)
        finally:
            if partial is not None:
                partial.unlink(missing_ok=True)
        return name

    def _make_folders(self, folder: Path) -> None:
        for part in (folder.parent, folder):
            name = part.relative_to(self._names).as_posix()
            if name not in self._durable:
                part.mkdir(exist_ok=True)
                sync_folder(
                    part.parent
                )  # also if it is there: a crash may have come between the two
                self._durable.add(name)

    def read(self, name: str) -> bytes:
        """The bytes, after they were found to hash to their name."""
        try:
            content = self.path(name).read_bytes()
        except OSError as error:
            raise Damaged(
                f"the blob {name} cannot be read ({error.strerror}); restore it from a backup or a worker"
            ) from None
        if sha256(content) != name:
            raise Damaged(
                f"the blob {name} is damaged on disk; restore it from a backup or a worker"
            )
        return content

    def verify(self, name: str) -> None:
        """Raise unless the stored bytes hash to their name; needs little memory."""
        digest = hashlib.sha256()
        try:
            with self.path(name).open("rb") as file:
                for piece in _pieces(file):
                    digest.update(piece)
        except OSError as error:
            raise Damaged(
                f"the blob {name} cannot be read ({error.strerror}); restore it from a backup or a worker"
            ) from None
        if digest.hexdigest() != name:
            raise Damaged(
                f"the blob {name} is damaged on disk; restore it from a backup or a worker"
            )

    def names(self) -> Iterator[str]:
        """All blobs."""
        return (path.name for path in sorted(self._names.glob("??/??/*")) if is_name(path.name))

    def delete(self, name: str) -> None:
        """Remove a blob that nothing refers to any more."""
        self.path(name).unlink(missing_ok=True)

    def put_chunk(self, task: int, fence: int, index: int, content: bytes) -> str:
        """Keep one chunk of an upload and return its sha256. Not synced: a chunk lost with the power is asked for again."""
        name = sha256(content)
        folder = self._upload(task, fence)
        try:
            if (folder / f"{index}.{name}").is_file():
                return name
            handle, written = tempfile.mkstemp(dir=self._partial)
            partial = Path(written)
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(content)
                with self._alone(task):
                    folder.mkdir(parents=True, exist_ok=True)
                    for old in folder.glob(f"{index}.*"):
                        old.unlink()
                    partial.replace(folder / f"{index}.{name}")
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            self._fail(f"keep chunk {index} of task {task}", error)
        return name

    def chunks(self, task: int, fence: int) -> dict[int, str]:
        """Which chunks of an upload are here, with their sha256: what a worker need not send again."""
        with self._alone(task):
            found = [path.name.partition(".") for path in self._upload(task, fence).glob("*.*")]
        return {int(index): name for index, _, name in found if index.isdecimal() and is_name(name)}

    def assemble(self, task: int, fence: int, chunks: list[str], name: str) -> str:
        """One durable blob from all chunks of an upload. Chunks that are missing or rotten are named, and forgotten."""
        folder = self._upload(task, fence)
        with self._alone(task):
            here = self.chunks(task, fence)
            missing = [
                index
                for index, chunk in enumerate(chunks)
                if here.get(index) != chunk or not _holds(folder / f"{index}.{chunk}", chunk)
            ]
            for index in missing:
                (folder / f"{index}.{here.get(index)}").unlink(missing_ok=True)
            if missing:
                raise Conflict(
                    f"task {task}: send the chunks {', '.join(map(str, missing[:20]))} (of {len(chunks)}) again"
                )
            return self.put_stream(
                ((folder / f"{index}.{chunk}").read_bytes() for index, chunk in enumerate(chunks)),
                name,
            )

    def drop_chunks(self, task: int, fence: int) -> None:
        """Forget an upload: it is a blob now, or will never be."""
        with self._alone(task):
            shutil.rmtree(self._upload(task, fence), ignore_errors=True)

    def keep_uploads(self, wanted: set[tuple[int, int]]) -> None:
        """Forget all uploads but those of these (task, fence); before anything else is done with them."""
        names = {self._upload(task, fence).name for task, fence in wanted}
        for folder in self._uploads.iterdir():
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def _alone(self, task: int) -> threading.RLock:
        """The lock of a task's upload."""
        return self._uploading[task % STRIPES]

    def _upload(self, task: int, fence: int) -> Path:
        if not (isinstance(task, int) and isinstance(fence, int) and task >= 0 and fence >= 0):
            raise Conflict("an upload is named by two small integers")
        return self._uploads / f"{task}.{fence}"

    def _fail(self, what: str, error: OSError) -> NoReturn:
        why = f"cannot {what}: {error.strerror or error}; free space or repair the disk, then start again"
        self._on_failure(why)
        raise StorageFailed(why) from error


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def _holds(path: Path, name: str) -> bool:
    try:
        return sha256(path.read_bytes()) == name
    except OSError:
        return False
