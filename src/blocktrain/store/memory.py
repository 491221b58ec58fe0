"""A store in memory, for tests and simulations that need no disk.

It keeps the contract in full, except that nothing survives the process. Its disk is an object of
its own: a store that is opened on the same disk again continues as after a crash.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blocktrain.errors import Conflict, Damaged, RunError, StorageFailed
from blocktrain.files import PIECE
from blocktrain.protocol.identity import canonical_json
from blocktrain.protocol.ledger import LedgerEntry
from blocktrain.protocol.transfer import sha256
from blocktrain.store.contract import (
    NOTHING,
    ByteCount,
    Changes,
    LeaseRecord,
    RoundRecord,
    StoredAnswer,
    StoredRun,
    UpdateRecord,
    VersionRecord,
    WorkerRecord,
    join_spans,
    link_entry,
    require_blob_name,
    require_chunks,
    require_link,
    require_settled,
    require_successor,
    require_upload,
)

ENDLESS = 1 << 50  # bytes


@dataclass
class MemoryDisk:
    """What a store leaves behind when it is closed."""

    run_id: str = ""
    epoch: int = 0
    document: dict[str, Any] | None = None
    ledger: list[LedgerEntry] = field(default_factory=list)
    versions: dict[int, list[VersionRecord]] = field(default_factory=dict)  # by block
    rounds: dict[int, RoundRecord] = field(default_factory=dict)  # by block
    leases: dict[int, LeaseRecord] = field(default_factory=dict)  # by task: those that are out
    over: dict[int, LeaseRecord] = field(default_factory=dict)  # by task: done or lost
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, number) -> task
    answers: dict[tuple[int, str], StoredAnswer] = field(default_factory=dict)  # in order
    waiting: dict[str, UpdateRecord] = field(default_factory=dict)  # accepted, not merged yet
    answered: dict[int, int] = field(default_factory=dict)  # task with an accepted update -> block
    totals: dict[str, tuple[int, int]] = field(default_factory=dict)  # see `contributions`
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    counts: dict[tuple[int, str], ByteCount] = field(default_factory=dict)
    nonces: dict[tuple[str, str], float] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        waiting = (update for update in self.waiting.values() if update.block == block)
        return tuple(sorted(waiting, key=lambda update: update.id))


class MemoryBlobs:
    """See `contract.Blobs`."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._blobs, self._uploads = disk.blobs, disk.uploads
        self._mutex = threading.RLock()

    def has(self, name: str) -> bool:
        return require_blob_name(name) in self._blobs

    def size(self, name: str) -> int:
        return len(self._get(name))

    def read(self, name: str) -> bytes:
        content = self._get(name)
        if sha256(content) != name:
            raise Damaged(f"the blob {name} is damaged")
        return content

    def _get(self, name: str) -> bytes:
        content = self._blobs.get(require_blob_name(name))
        if content is None:
            raise Damaged(f"the blob {name} cannot be read: it is not there")
        return content

    def pieces(self, name: str, start: int = 0) -> Iterator[bytes]:
        content = self._get(name)
        return (content[at : at + PIECE] for at in range(start, len(content), PIECE))

    def verify(self, name: str) -> None:
        self.read(name)

    def names(self) -> Iterator[str]:
        return iter(sorted(self._blobs))

    def export(self, name: str, target: Path) -> None:
        target.write_bytes(self.read(name))

    def put(self, content: bytes) -> str:
        return self.put_stream([content], sha256(content))

    def put_stream(self, pieces: Iterable[bytes], name: str) -> str:
        content = b"".join(pieces)
        if sha256(content) != require_blob_name(name):
            raise Conflict(f"the bytes hash to {sha256(content)}, not to {name}: send them again")
        self._blobs[name] = content
        return name

    def link(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            self._blobs[require_blob_name(name)] = path.read_bytes()

    def delete(self, name: str) -> None:
        self._blobs.pop(require_blob_name(name), None)

    def free(self) -> int:
        return ENDLESS

    def put_chunk(self, task: int, fence: int, index: int, content: bytes) -> str:
        with self._mutex:
            self._uploads.setdefault(require_upload(task, fence), {})[index] = content
        return sha256(content)

    def chunks(self, task: int, fence: int) -> dict[int, str]:
        with self._mutex:
            here = self._uploads.get(require_upload(task, fence), {})
            return {index: sha256(content) for index, content in here.items()}

    def assemble(self, task: int, fence: int, chunks: Sequence[str], name: str) -> str:
        with self._mutex:
            here = self.chunks(task, fence)
            missing = [i for i, chunk in enumerate(chunks) if here.get(i) != chunk]
            for index in missing:
                self._uploads.get((task, fence), {}).pop(index, None)
            require_chunks(task, missing, len(chunks))
            return self.put_stream(
                (self._uploads[task, fence][i] for i in range(len(chunks))), name
            )

    def drop_chunks(self, task: int, fence: int) -> None:
        with self._mutex:
            self._uploads.pop(require_upload(task, fence), None)

    def keep_uploads(self, tasks: set[tuple[int, int]]) -> None:
        with self._mutex:
            for key in [key for key in self._uploads if key not in tasks]:
                del self._uploads[key]


class MemoryStore:
    """See `contract.Store`. Every change is checked as a whole before any of it is made."""

    address = ""

    def __init__(self, disk: MemoryDisk | None = None, run_id: str | None = None) -> None:
        self._disk = disk or MemoryDisk()
        self._disk.run_id = self._disk.run_id or run_id or uuid.uuid4().hex
        if run_id is not None and run_id != self._disk.run_id:
            raise RunError(f"the store holds the run {self._disk.run_id}, not {run_id}")
        self._disk.epoch += 1
        self.run_id, self.epoch = self._disk.run_id, self._disk.epoch
        self.blobs = MemoryBlobs(self._disk)
        self._mutex = threading.RLock()
        self._closed = False

    def require_open(self) -> None:
        if self._closed:
            raise StorageFailed("the store is closed: it was closed")
        if self.epoch != self._disk.epoch:
            raise StorageFailed("the store is closed: it was taken over by another coordinator")

    def _tables(self) -> MemoryDisk:
        self.require_open()
        return self._disk

    def close(self) -> None:
        self._closed = True

    def create_run(self, document: dict[str, Any]) -> bool:
        with self._mutex:
            disk = self._tables()
            if disk.document is not None:
                if canonical_json(disk.document) != canonical_json(document):
                    raise Conflict("the store holds a run with other settings")
                return False
            entry = link_entry(self.head(), "run", {**document, "run": self.run_id})
            disk.document = dict(document)
            disk.ledger.append(entry)
            return True

    def run(self) -> dict[str, Any] | None:
        return self._tables().document

    def save(self, changes: Changes) -> None:
        with self._mutex:
            self._check(changes, changes.entries)
            self._apply(changes, changes.entries)

    def record_update(
        self, update: UpdateRecord, entry: LedgerEntry, receipt: bytes, changes: Changes = NOTHING
    ) -> StoredAnswer:
        if not self.blobs.has(update.payload):
            raise Conflict(f"the payload {update.payload} is not stored")
        with self._mutex:
            if (known := self.answer(update.task, update.payload)) is not None:
                return known
            entries = (entry, *changes.entries)
            self._check(changes, entries, update.task if update.accepted else None)
            lease = self._disk.leases.get(update.task)
            key = (update.fence, update.worker, update.block, update.base)
            if update.accepted:
                if lease is None or (lease.fence, lease.worker, lease.block, lease.base) != key:
                    raise Conflict(
                        f"task {update.task} is not out with fence {update.fence} "
                        f"for {update.worker}"
                    )
                self._disk.over[update.task] = self._disk.leases.pop(update.task)
                self._disk.waiting[update.id] = update
                self._disk.answered[update.task] = update.block
            elif lease is None and update.task not in self._disk.over:
                raise Conflict(f"the store refused a change: there is no task {update.task}")
            answer = StoredAnswer(update, receipt, repeated=False)
            self._disk.answers[update.task, update.payload] = answer
            self._apply(changes, entries)
            return answer

    def answer(self, task: int, payload: str) -> StoredAnswer | None:
        answer = self._tables().answers.get((task, payload))
        return answer and replace(answer, repeated=True)

    def answered_block(self, task: int) -> int | None:
        return self._tables().answered.get(task)

    def publish_version(
        self,
        version: VersionRecord,
        entry: LedgerEntry,
        applied: Sequence[str],
        changes: Changes = NOTHING,
    ) -> None:
        for name in version.blobs:
            if not self.blobs.has(name):
                raise Conflict(f"the blob {name} of version {version.version} is not stored")
        with self._mutex:
            require_successor(version, self.version(version.block))
            require_settled(version, applied, changes, self.pending(version.block))
            entries = (entry, *changes.entries)
            self._check(changes, entries)
            for name in applied:
                update = self._disk.waiting.pop(name)
                count, tokens = self._disk.totals.get(update.worker, (0, 0))
                self._disk.totals[update.worker] = (count + 1, tokens + update.tokens)
            self._disk.versions.setdefault(version.block, []).append(version)
            self._disk.rounds.pop(version.block, None)
            self._apply(changes, entries)

    def version(self, block: int, version: int | None = None) -> VersionRecord | None:
        chain = self._tables().versions.get(block, [])
        if version is None:
            return chain[-1] if chain else None
        return chain[version] if 0 <= version < len(chain) else None

    def pending(self, block: int) -> tuple[UpdateRecord, ...]:
        with self._mutex:
            return self._tables().pending(block)

    def ledger(self, after: int = 0, limit: int | None = None) -> list[LedgerEntry]:
        after = max(0, after)
        return self._tables().ledger[after : None if limit is None else after + limit]

    def head(self) -> LedgerEntry | None:
        entries = self._tables().ledger
        return entries[-1] if entries else None

    def workers(self) -> list[WorkerRecord]:
        return sorted(self._tables().workers.values(), key=lambda worker: worker.id)

    def byte_counts(self) -> list[ByteCount]:
        return [count for _, count in sorted(self._tables().counts.items())]

    def contributions(self) -> dict[str, tuple[int, int]]:
        return dict(self._tables().totals)

    def forget_nonces(self, before: float) -> int:
        with self._mutex:
            old = [key for key, stamp in self._tables().nonces.items() if stamp < before]
            for key in old:
                del self._disk.nonces[key]
            return len(old)

    def recover(self, kept_times: int) -> StoredRun:
        with self._mutex:
            disk = self._tables()
            tasks = {**disk.over, **disk.leases}
            numbers: dict[int, int] = {}
            for lease in tasks.values():
                numbers[lease.block] = max(numbers.get(lease.block, 0), lease.number + 1)
            blocks = sorted(disk.versions)
            return StoredRun(
                versions=tuple(disk.versions[block][-1] for block in blocks),
                rounds=tuple(current for _, current in sorted(disk.rounds.items())),
                leases=tuple(lease for _, lease in sorted(disk.leases.items())),
                workers=tuple(self.workers()),
                pending=tuple(u for block in blocks for u in disk.pending(block)),
                task_seconds={block: self._times(block, kept_times) for block in blocks},
                next_numbers=numbers,
                read=join_spans(self._spans()),
                next_task=max(tasks, default=0) + 1,
            )

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        for answer in self._disk.answers.values():
            if answer.update.accepted:
                task = self._disk.over[answer.update.task]
                yield task.block, task.position, answer.update.steps

    def _times(self, block: int, count: int) -> tuple[float, ...]:
        updates = (answer.update for answer in self._disk.answers.values())
        of_block = (u for u in updates if u.block == block and u.accepted)
        times = [u.seconds for u in of_block if u.seconds is not None]
        return tuple(times[max(0, len(times) - count) :])

    def _check(
        self, changes: Changes, entries: Sequence[LedgerEntry], finished: int | None = None
    ) -> None:
        """A Conflict, if any of this is not possible now. `finished`: the task that it ends."""
        disk, head = self._tables(), self.head()
        for entry in entries:
            require_link(head, entry)
            head = entry
        self._check_leases(changes.leases, finished)
        for name in changes.dropped:
            if name not in disk.waiting:
                raise Conflict(f"the update {name} does not wait for a merge and cannot be dropped")
        nonces = [(used.worker, used.nonce) for used in changes.nonces]
        if len(set(nonces)) != len(nonces) or any(key in disk.nonces for key in nonces):
            raise Conflict("the store refused a change: a nonce was used before")

    def _check_leases(self, leases: Sequence[LeaseRecord], finished: int | None) -> None:
        """Fences only rise, finished tasks stay finished, and a block's numbers are used once."""
        disk = self._disk
        seen: dict[int, LeaseRecord] = {}
        numbers: dict[tuple[int, int], int] = {}
        for lease in leases:
            if lease.task in disk.over or lease.task == finished:
                raise Conflict(f"task {lease.task} is over")
            out = seen.get(lease.task) or disk.leases.get(lease.task)
            if out and (
                lease.fence < out.fence or (lease.fence == out.fence and lease.worker != out.worker)
            ):
                raise Conflict(
                    f"task {lease.task} has the fence {out.fence} of {out.worker}, "
                    f"not {lease.fence} of {lease.worker}"
                )
            key = (lease.block, lease.number)
            holder = numbers.setdefault(key, disk.numbers.get(key, lease.task))
            if holder != lease.task:
                raise Conflict(
                    f"the store refused a change: number {lease.number} of block {lease.block} "
                    f"is task {holder}"
                )
            seen[lease.task] = lease

    def _apply(self, changes: Changes, entries: Sequence[LedgerEntry]) -> None:
        disk = self._disk
        for lease in changes.leases:
            disk.leases[lease.task] = lease
            disk.numbers[lease.block, lease.number] = lease.task
        for times in changes.times:
            out = disk.leases.get(times.task)
            if out and out.fence == times.fence and not out.expired:
                aged = replace(out, age=times.age, remaining=times.remaining)
                disk.leases[times.task] = aged
        for task in changes.lost:
            if task in disk.leases:
                disk.over[task] = disk.leases.pop(task)
        for name in changes.dropped:
            del disk.waiting[name]
        disk.rounds.update((current.block, current) for current in changes.rounds)
        disk.workers.update((worker.id, worker) for worker in changes.workers)
        for worker in changes.gone:
            disk.workers.pop(worker, None)
        for count in changes.counts:
            key = (count.block, count.worker)
            old = disk.counts.get(key, ByteCount(*key))
            disk.counts[key] = ByteCount(
                *key, old.bytes_in + count.bytes_in, old.bytes_out + count.bytes_out
            )
        disk.nonces.update({(n.worker, n.nonce): n.time for n in changes.nonces})
        disk.ledger.extend(entries)
