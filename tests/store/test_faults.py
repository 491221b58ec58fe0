"""The store under fire: killed, out of space, with a disk that fails.

What it acknowledged is there; what failed it never acknowledged.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from blocktrain.errors import StorageFailed
from blocktrain.protocol.ledger import require_chain
from blocktrain.store.blobs import FolderBlobs
from blocktrain.store.contract import Changes, link_entry
from blocktrain.store.open import open_store

SOURCE = str(Path(__file__).parents[2] / "src")


WRITER = textwrap.dedent(
    """
    import sys
    from blocktrain.protocol.identity import canonical_json
    from blocktrain.store.contract import (
        Changes, LeaseRecord, UpdateRecord, VersionRecord, link_entry
    )
    from blocktrain.store.open import open_store

    store, size = open_store(sys.argv[1]), int(sys.argv[2])

    def publish(number, content, applied, reason):
        name = store.blobs.put(content)
        record = VersionRecord(1, number, name, None, number, number, None, (), reason)
        body = {"version": number, "weights": name, "applied": applied}
        store.publish_version(record, link_entry(store.head(), "version", body), applied)

    if store.version(1) is None:
        store.create_run({"blocks": 1})
        publish(0, b"0", [], "start")
    stored = store.recover(9)
    n, task = stored.versions[0].version, stored.next_task
    print("ready", flush=True)
    while True:
        for update in store.pending(1):  # recorded before a crash, not yet merged
            n += 1
            publish(n, b"%d" % n, [update.id], "closed")
            print("version", n, flush=True)
        lease = LeaseRecord(task, task, 1, n, 1, "w", 1, 0, 0, 0.0, 1e9, 1.0, False, False)
        store.save(Changes(leases=[lease]))
        payload = store.blobs.put(b"%d-" % task + bytes(size))
        update = UpdateRecord(task, 1, 1, n, "w", payload, 1, 1, 1, 1.0, 0, 1.0, True, "accepted")
        body = {"task": task, "id": update.id, "payload": payload}
        entry = link_entry(store.head(), "update", body)
        receipt = canonical_json({"task": task, "hash": entry.hash}).encode()
        answer = store.record_update(update, entry, receipt)
        print("update", task, payload, answer.receipt.decode(), flush=True)
        task += 1
    """
)


def writer(
    folder: Path, size: int = 10, limit: int | None = None, preload: Path | None = None
) -> subprocess.Popen[str]:
    """A coordinator in small, which says on stdout what it acknowledges."""
    env = {
        "PYTHONPATH": SOURCE,
        **(
            {"LD_PRELOAD": str(preload), "FAIL_FILE": str(folder.parent / "fail")}
            if preload
            else {}
        ),
    }
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        if limit
        else ""
    ) + WRITER
    command = [sys.executable, "-c", script, str(folder), str(size)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def acknowledged(lines: list[str]) -> tuple[dict[int, tuple[str, str]], list[int]]:
    whole = [line.split() for line in lines if line.endswith("\n")]
    updates = {int(words[1]): (words[2], words[3]) for words in whole if words[0] == "update"}
    return updates, [int(words[1]) for words in whole if words[0] == "version"]


def check_everything(
    folder: Path, updates: dict[int, tuple[str, str]], versions: list[int]
) -> None:
    """Nothing acknowledged is missing, nothing is there twice, every hash is right."""
    with sqlite3.connect(folder / "run.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    store = open_store(folder)
    entries = store.ledger()
    require_chain(entries)
    told = [json.loads(e.body) for e in entries if e.kind == "update"]
    made = [json.loads(e.body) for e in entries if e.kind == "version"]
    assert len({t["task"] for t in told}) == len(told)
    assert [v["version"] for v in made] == list(range(len(made)))
    merged = [name for v in made for name in v["applied"]]
    assert len(set(merged)) == len(merged)
    assert set(merged) | {u.id for u in store.pending(1)} == {t["id"] for t in told}
    for task, (payload, receipt) in updates.items():
        answer = store.answer(task, payload)
        assert answer is not None and answer.receipt.decode() == receipt
    assert set(versions) <= {v["version"] for v in made}
    for name in [t["payload"] for t in told] + [v["weights"] for v in made]:
        store.blobs.verify(name)
    store.close()


def test_sigkill_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    updates: dict[int, tuple[str, str]] = {}
    versions: list[int] = []
    for attempt in range(5):
        process = writer(folder)
        if process.stdout is None or process.stderr is None:
            raise AssertionError
        first = process.stdout.readline()
        assert first == "ready\n", process.stderr.read()
        time.sleep(0.02 + 0.11 * attempt)
        lines: list[str] = []
        while attempt == 4 and not all(
            acknowledged(lines)
        ):  # at least once something is acknowledged, however slow the disk
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        new, published = acknowledged(lines)
        assert not set(new) & set(updates)
        updates.update(new)
        versions += published
        check_everything(folder, updates, versions)
    assert updates and versions


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=250)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("size", "what"), [(500_000, "cannot store the blob"), (10, "cannot commit")]
)
def test_file_size_limit_is_never_acknowledged(tmp_path: Path, size: int, what: str) -> None:
    """A real error of the kernel in the middle of a blob, and of the database's log."""
    out, errors = ended(writer(tmp_path / "s", size, limit=400_000))
    assert "StorageFailed" in errors and what in errors, errors
    updates, versions = acknowledged(out.splitlines(keepends=True))
    assert bool(updates) == (size < 400_000)
    check_everything(tmp_path / "s", updates, versions)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mount"), reason="needs root to mount a small disk"
)
def test_full_disk_is_never_acknowledged(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        out, errors = ended(writer(disk / "s", 20_000))
        assert "StorageFailed" in errors, errors
        assert "No space left" in errors or "full" in errors
        updates, versions = acknowledged(out.splitlines(keepends=True))
        assert updates
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        check_everything(disk / "s", updates, versions)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int broken(void) { const char *f = getenv("FAIL_FILE"); return f && access(f, F_OK) == 0; }
int fsync(int fd) {
  if (broken()) { errno = EIO; return -1; }
  return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd);
}
int fdatasync(int fd) {
  if (broken()) { errno = EIO; return -1; }
  return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler for the failing fsync")
def test_failing_fsync_is_never_acknowledged(tmp_path: Path) -> None:
    """fsync and fdatasync answer EIO, for Python and inside SQLite alike."""
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(shim), str(tmp_path / "shim.c"), "-ldl"], check=True
    )
    folder, fail = tmp_path / "s", tmp_path / "fail"
    process = writer(folder, preload=shim)
    if process.stdout is None:
        raise AssertionError
    lines = [process.stdout.readline() for _ in range(4)]
    fail.touch()
    out, errors = ended(process)
    assert "StorageFailed" in errors and (
        "Input/output error" in errors or "disk I/O error" in errors
    ), errors
    updates, versions = acknowledged(lines + out.splitlines(keepends=True))
    assert updates
    fail.unlink()
    check_everything(folder, updates, versions)


def test_failing_commit_closes_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first failure nothing is written any more, not even what would work again."""
    store = open_store(tmp_path)
    store.create_run({})
    before = len(store.ledger())
    big = link_entry(store.head(), "finish", {"x": "y" * 100_000})
    small = link_entry(store.head(), "finish", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageFailed, match="cannot commit"):
            store.save(Changes(entries=[big]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(StorageFailed, match="closed"):
        store.save(Changes(entries=[small]))
    store.close()
    again = open_store(tmp_path)
    assert len(again.ledger()) == before
    monkeypatch.setattr(os, "fsync", _eio)
    with pytest.raises(StorageFailed, match="Input/output error"):
        again.blobs.put(b"content")
    monkeypatch.undo()
    with pytest.raises(StorageFailed, match="closed"):
        again.save(Changes(entries=[small]))


def test_blob_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, seen = FolderBlobs(tmp_path), list[str]()
    sync, rename = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        seen.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def replaced(self: Path, target: Path) -> Path:
        seen.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replaced)
    blobs.put(b"content")
    assert seen == ["file", "folder", "folder", "rename", "folder"]


def _eio(handle: int) -> None:
    raise OSError(5, "Input/output error")
