"""A disk that keeps what was made durable, and may lose all else.

It has two images. The one that programs see changes with every step. The other is what a power
loss leaves: the content of a file since its last sync, and the names of a folder since its last
sync. Whatever differs between them may come back old, new, torn or empty, each on its own, so that
writes are also lost in any order. A process that is killed loses nothing: the system still has it.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blocktrain.files import PIECE

Effect = Callable[[str, str], bool]
"""(step, path): called before a step, and again after it. It may end the process.

True, if the step fails.
"""


@dataclass(eq=False)
class Inode:
    """A file, or (with no content) a folder."""

    content: bytes | None
    synced: bytes | None = None  # what a power loss leaves
    broken: bool = False  # a sync has failed: later ones succeed and do nothing, as on Linux


FolderNames = dict[str, dict[str, Inode]]  # by folder


class SimulatedFiles:
    """See `files.FileSystem`."""

    def __init__(self) -> None:
        self._names: FolderNames = {}
        self._durable: FolderNames = {}
        self._created = 0
        self.effect: Effect = lambda *_: False

    # What programs see

    def _find(self, path: Path) -> Inode | None:
        return self._names.get(str(path.parent), {}).get(path.name)

    def _file(self, path: Path) -> bytes:
        node = self._find(path)
        if node is None or node.content is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return node.content

    def is_file(self, path: Path) -> bool:
        node = self._find(path)
        return node is not None and node.content is not None

    def size(self, path: Path) -> int:
        return len(self._file(path))

    def read(self, path: Path) -> bytes:
        return self._file(path)

    def pieces(self, path: Path, start: int) -> Iterator[bytes]:
        content = self._file(path)
        return (content[at : at + PIECE] for at in range(start, len(content), PIECE))

    def find(self, folder: Path, pattern: str) -> list[Path]:
        first, _, rest = pattern.partition("/")
        names = self._names.get(str(folder), {})
        found = [folder / name for name in names if fnmatchcase(name, first)]
        return [below for path in found for below in self.find(path, rest)] if rest else found

    def _require_folder(self, folder: Path) -> dict[str, Inode]:
        if str(folder) not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
        return self._names[str(folder)]

    def create(self, folder: Path, pieces: Iterable[bytes]) -> Path:
        names = self._require_folder(folder)
        self._created += 1
        path = folder / f"tmp{self._created}"
        self._step("create", path)
        node = names[path.name] = Inode(b"")
        try:
            content = b"".join(pieces)
            node.content = content[: len(content) // 2]
            self._step("write", path)
            node.content = content
        except Exception:
            names.pop(path.name, None)
            raise
        return path

    def copy(self, source: Path, folder: Path) -> Path:
        path, content = folder / source.name, source.read_bytes()
        self._require_folder(folder)[path.name] = Inode(content, content)
        return path

    def sync(self, path: Path) -> None:
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        if self.effect("sync", path.name):
            node.broken = True
            raise OSError(errno.EIO, "Input/output error", str(path))
        if not node.broken:
            node.synced = node.content

    def sync_folder(self, folder: Path) -> None:
        names = self._require_folder(folder)
        self._step("sync folder", folder)
        self._durable[str(folder)] = dict(names)

    def rename(self, path: Path, target: Path) -> None:
        if self._find(path) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        names = self._require_folder(target.parent)
        self._step("rename", target)
        names[target.name] = self._names[str(path.parent)].pop(path.name)

    def delete(self, path: Path) -> None:
        if self._find(path) is not None:
            self._step("delete", path)
            del self._names[str(path.parent)][path.name]

    def make_folder(self, folder: Path) -> None:
        if str(folder) in self._names:
            return
        if folder != folder.parent:
            self.make_folder(folder.parent)
            self._step("make folder", folder)
            self._names[str(folder.parent)][folder.name] = Inode(None)
        self._names[str(folder)] = {}

    def free(self, folder: Path) -> int:
        return 1 << 50

    def delete_tree(self, folder: Path) -> None:
        names = self._names.get(str(folder))
        if names is None:
            return
        for name, node in list(names.items()):
            if node.content is None:
                self.delete_tree(folder / name)
            else:
                self.delete(folder / name)
        self._step("delete folder", folder)
        del self._names[str(folder)]
        self._names[str(folder.parent)].pop(folder.name, None)

    def _step(self, step: str, path: Path) -> None:
        if self.effect(step, path.name):
            raise OSError(errno.EIO, "Input/output error", str(path))

    # What a power loss leaves

    def lose_power(self, draw: random.Random) -> None:
        """Come back with what was durable, and any part of the rest."""
        folders = sorted(self._names.keys() | self._durable.keys())
        names: FolderNames = {folder: {} for folder in folders}
        for folder in folders:
            new, old = self._names.get(folder, {}), self._durable.get(folder, {})
            for name in sorted(new.keys() | old.keys()):
                node = new.get(name)
                if node is not old.get(name) and draw.random() < 0.5:
                    node = old.get(name)
                if node is not None:
                    names[folder][name] = _after_loss(node, draw)
        self._names = {}
        self._keep("/", names)
        self._durable = {folder: dict(found) for folder, found in self._names.items()}

    def _keep(self, folder: str, names: FolderNames) -> None:
        """What can be reached from a folder."""
        self._names[folder] = names.get(folder, {})
        for name, node in self._names[folder].items():
            if node.content is None:
                self._keep(str(Path(folder, name)), names)

    def is_durable(self, path: Path) -> bool:
        """Whether a file would survive a power loss as it is now, under its name."""
        node, folder = self._find(path), path.parent
        durable = self._durable.get(str(folder), {}).get(path.name)
        if node is None or durable is not node or node.synced != node.content:
            return False
        while folder != folder.parent:
            if folder.name not in self._durable.get(str(folder.parent), {}):
                return False
            folder = folder.parent
        return True


def _after_loss(node: Inode, draw: random.Random) -> Inode:
    if node.content is None:
        return node
    content, synced = node.content, node.synced
    if synced != content:
        torn = content[: draw.randrange(len(content) + 1)]
        content = draw.choice((synced or b"", torn, bytes(len(content)), content))
    return Inode(content, content)
