"""Blobs in a folder: one file for each, and the chunks of uploads that are not complete."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from blocktrain.errors import Conflict, Damaged, StorageFailed
from blocktrain.files import FileSystem, SystemFiles
from blocktrain.protocol.transfer import sha256
from blocktrain.store.contract import (
    is_blob_name,
    require_blob_name,
    require_chunks,
    require_upload,
)

STRIPES = 64  # uploads that do not wait for each other
_RESTORE = "restore it from a backup or a worker"


class FolderBlobReader:
    """Files ab/cd/abcd... below a folder, and linked ones. See `contract.BlobReader`."""

    def __init__(self, folder: Path, files: FileSystem | None = None) -> None:
        self._files = files or SystemFiles()
        self._names = folder / "blobs"
        # All in one folder, which is made durable once: there are many of them, and all at once.
        self._linked = self._names / "linked"

    def _path(self, name: str) -> Path:
        return self._names / require_blob_name(name)[:2] / name[2:4] / name

    def _find(self, name: str) -> Path:
        """Where a blob is. If it is nowhere, where it would be."""
        linked, path = self._linked / require_blob_name(name), self._path(name)
        files = self._files
        return linked if files.is_file(linked) and not files.is_file(path) else path

    def has(self, name: str) -> bool:
        return self._files.is_file(self._find(name))

    def size(self, name: str) -> int:
        try:
            return self._files.size(self._find(name))
        except OSError:
            raise Damaged(f"the blob {name} is missing; {_RESTORE}") from None

    def read(self, name: str) -> bytes:
        try:
            content = self._files.read(self._find(name))
        except OSError as error:
            raise _unreadable(name, error) from None
        if sha256(content) != name:
            raise Damaged(f"the blob {name} is damaged on disk; {_RESTORE}")
        return content

    def pieces(self, name: str, start: int = 0) -> Iterator[bytes]:
        try:
            yield from self._files.pieces(self._find(name), start)
        except OSError as error:
            raise _unreadable(name, error) from None

    def verify(self, name: str) -> None:
        digest = hashlib.sha256()
        for piece in self.pieces(name):
            digest.update(piece)
        if digest.hexdigest() != name:
            raise Damaged(f"the blob {name} is damaged on disk; {_RESTORE}")

    def names(self) -> Iterator[str]:
        find = self._files.find
        paths = (*find(self._names, "??/??/*"), *find(self._linked, "*"))
        return iter(sorted({path.name for path in paths if is_blob_name(path.name)}))

    def export(self, name: str, target: Path) -> None:
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            _link(self._find(name), partial)
            partial.replace(target)
        except FileNotFoundError as error:
            raise _unreadable(name, error) from None
        finally:
            partial.unlink(missing_ok=True)


def _is_link_or_copy(target: os.stat_result, source: os.stat_result) -> bool:
    """The same file, or one on another disk with the same size."""
    if target.st_dev == source.st_dev:
        return target.st_ino == source.st_ino
    return target.st_size == source.st_size


def _link(path: Path, target: Path) -> None:
    """A hard link; to another disk a symbolic one; a copy where there are no links."""
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:
        try:
            target.symlink_to(path.resolve(strict=True))
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(path, target)


def _unreadable(name: str, error: OSError) -> Damaged:
    return Damaged(f"the blob {name} cannot be read ({error.strerror}); {_RESTORE}")


class FolderBlobs(FolderBlobReader):
    """Also writes. See `contract.Blobs`. A failed write calls `on_failure`."""

    def __init__(
        self,
        folder: Path,
        on_failure: Callable[[str], object] = lambda _: None,
        files: FileSystem | None = None,
    ) -> None:
        super().__init__(folder, files)
        self._uploads = folder / "uploads"
        self._partial = folder / "partial"
        self._on_failure = on_failure
        # The chunks of one upload come from several threads, and some of them twice.
        self._locks = [threading.RLock() for _ in range(STRIPES)]
        self._durable: set[str] = set()  # folders whose names this process has synced
        try:
            self._files.delete_tree(self._partial)  # what a crash left half written
            for part in (self._names, self._uploads, self._partial):
                self._files.make_folder(part)
            self._files.sync_folder(folder)
        except OSError as error:
            self._fail("prepare the blob folder", error)

    def put(self, content: bytes) -> str:
        return self.put_stream([content], sha256(content))

    def put_stream(self, pieces: Iterable[bytes], name: str) -> str:
        target, files = self._path(name), self._files
        digest = hashlib.sha256()
        partial: Path | None = None

        def digested() -> Iterator[bytes]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        try:
            partial = files.create(self._partial, digested())
            if digest.hexdigest() != name:
                raise Conflict(
                    f"the bytes hash to {digest.hexdigest()}, not to {name}: send them again"
                )
            files.sync(partial)
            self._make_folders(target.parent)
            files.rename(partial, target)  # also over an old copy: that one may be damaged
            files.sync_folder(target.parent)
        except OSError as error:
            self._fail(f"store the blob {name}", error)
        finally:
            if partial is not None:
                files.delete(partial)
        return name

    def link(self, files: Mapping[str, Path]) -> None:
        try:
            self._files.make_folder(self._linked)
            for name, path in files.items():
                self._link_file(path, self._linked / require_blob_name(name))
            self._files.sync_folder(self._linked)
            self._files.sync_folder(self._names)
        except OSError as error:
            self._fail(f"take over the files of the corpus ({error.filename})", error)

    def _link_file(self, path: Path, target: Path) -> None:
        if target.is_file() and _is_link_or_copy(target.stat(), path.stat()):
            return  # of an earlier start
        self._files.rename(self._files.copy(path, self._partial), target)

    def _make_folders(self, folder: Path) -> None:
        for part in (folder.parent, folder):
            name = part.relative_to(self._names).as_posix()
            if name not in self._durable:
                self._files.make_folder(part)
                # Also if it is there: a crash may have come between mkdir and sync.
                self._files.sync_folder(part.parent)
                self._durable.add(name)

    def delete(self, name: str) -> None:
        self._files.delete(self._path(name))
        self._files.delete(self._linked / name)

    def free(self) -> int:
        try:
            return self._files.free(self._names)
        except OSError as error:
            self._fail("see how much the disk has left", error)

    def put_chunk(self, task: int, fence: int, index: int, content: bytes) -> str:
        name, files = sha256(content), self._files
        folder = self._upload(task, fence)
        try:
            if files.is_file(folder / f"{index}.{name}"):
                return name
            partial = files.create(self._partial, [content])
            try:
                with self._lock(task):
                    files.make_folder(folder)
                    for old in files.find(folder, f"{index}.*"):
                        files.delete(old)
                    files.rename(partial, folder / f"{index}.{name}")
            finally:
                files.delete(partial)
        except OSError as error:
            self._fail(f"keep chunk {index} of task {task}", error)
        return name

    def chunks(self, task: int, fence: int) -> dict[int, str]:
        with self._lock(task):
            found = self._files.find(self._upload(task, fence), "*.*")
        parts = [path.name.partition(".") for path in found]
        return {
            int(index): name for index, _, name in parts if index.isdecimal() and is_blob_name(name)
        }

    def assemble(self, task: int, fence: int, chunks: Sequence[str], name: str) -> str:
        folder = self._upload(task, fence)
        with self._lock(task):
            here = self.chunks(task, fence)
            missing = [
                index
                for index, chunk in enumerate(chunks)
                if here.get(index) != chunk or not self._holds(folder / f"{index}.{chunk}", chunk)
            ]
            for index in missing:
                self._files.delete(folder / f"{index}.{here.get(index)}")
            require_chunks(task, missing, len(chunks))
            parts = (folder / f"{index}.{chunk}" for index, chunk in enumerate(chunks))
            return self.put_stream((self._files.read(part) for part in parts), name)

    def drop_chunks(self, task: int, fence: int) -> None:
        with self._lock(task):
            self._files.delete_tree(self._upload(task, fence))

    def keep_uploads(self, tasks: set[tuple[int, int]]) -> None:
        names = {self._upload(task, fence).name for task, fence in tasks}
        for folder in self._files.find(self._uploads, "*"):
            if folder.name not in names:
                self._files.delete_tree(folder)

    def _holds(self, path: Path, name: str) -> bool:
        try:
            return sha256(self._files.read(path)) == name
        except OSError:
            return False

    def _lock(self, task: int) -> threading.RLock:
        return self._locks[task % STRIPES]

    def _upload(self, task: int, fence: int) -> Path:
        require_upload(task, fence)
        return self._uploads / f"{task}.{fence}"

    def _fail(self, what: str, error: OSError) -> NoReturn:
        why = (
            f"cannot {what}: {error.strerror or error}; "
            "free space or repair the disk, then start again"
        )
        self._on_failure(why)
        raise StorageFailed(why) from error
