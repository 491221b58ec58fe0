"""The one thread of a stage that computes, several sessions at a time."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from blocktrain.learning.compose import PIECE
from blocktrain.learning.threads import use_threads
from blocktrain.serving.blocks import Rows, ServedBlocks
from blocktrain.serving.line.connection import DTYPES, ids_tensor, tensor_bytes
from blocktrain.serving.stage.sessions import Session, Work

log = logging.getLogger("blocktrain.stage")


class Compute:
    """`put` work from the event loop; `on_finish` is called there with works that are over."""

    def __init__(
        self, blocks: ServedBlocks, on_finish: Callable[[list[Work]], None], threads: int = 1
    ) -> None:
        self._blocks, self._on_finish, self._threads = blocks, on_finish, threads
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._turns: deque[Session] = deque()  # sessions with work, in the order of their turns
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; results go to the loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Works of one session are computed in the order of their `put`."""
        self._inbox.put(work)

    def stop(self) -> None:
        """End after the round that is under way."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        use_threads(self._threads)
        with torch.inference_mode():
            while self._collect():
                if not self._deliver(self._round()):
                    return

    def _deliver(self, finished: list[Work]) -> bool:
        """Hand over what is finished; False if the loop is closed.

        This thread keeps no reference: sessions may end while it waits, and their caches are
        freed then.
        """
        try:
            if finished:
                self._loop.call_soon_threadsafe(self._on_finish, finished)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _collect(self) -> bool:
        """Take the waiting works, or wait for one; False at the end."""
        try:
            while True:
                work = self._inbox.get(block=not self._turns)
                if work is None:
                    return False
                if not work.session.works:
                    self._turns.append(work.session)
                work.session.works.append(work)
        except queue.Empty:
            return True

    def _round(self) -> list[Work]:
        """One forward pass for as many sessions as fit, each with its oldest work."""
        batch: list[tuple[Work, int]] = []
        finished: list[Work] = []
        room = PIECE  # rows: BLAS may sum longer products in another order
        for _ in range(len(self._turns)):
            session = self._turns.popleft()
            while session.works and (session.closed or session.works[0].dropped):
                finished.append(session.works.popleft())
            if not session.works:
                continue
            work = session.works[0]
            rows = (
                min(work.run.count - work.offset, PIECE)
                if self._blocks.in_pieces
                else work.run.count
            )
            if batch and (rows > room or not self._blocks.in_pieces):
                self._turns.appendleft(session)
                break
            batch.append((work, rows))
            room -= rows
        if batch:
            self._compute(batch)
        for work, _ in batch:
            if work.result is not None or work.failed:
                finished.append(work.session.works.popleft())
            if work.session.works:
                self._turns.append(work.session)
        return finished

    def _compute(self, batch: Sequence[tuple[Work, int]]) -> None:
        began = time.perf_counter()
        try:
            for (work, rows), output in zip(
                batch, self._blocks.work([self._rows(*c) for c in batch]), strict=True
            ):
                work.outputs.append(output)
                work.offset += rows
                if work.offset == work.run.count:
                    whole = (
                        work.outputs[0]
                        if len(work.outputs) == 1
                        else torch.cat(work.outputs, dim=1)
                    )
                    work.count = whole.shape[1]
                    work.result = tensor_bytes(whole, work.session.wire)
                    work.outputs = []
        except Exception:  # these sessions fail, the others go on
            log.exception("could not compute a result")
            for work, _ in batch:
                work.result, work.failed = None, True
        seconds = time.perf_counter() - began
        for work, _ in batch:
            work.seconds += seconds

    def _rows(self, work: Work, rows: int) -> Rows:
        session, run, width = work.session, work.run, self._blocks.state_width
        device = self._blocks.device
        if session.memory is None:
            session.memory = self._blocks.fresh(session.blocks)
        start = len(work.payload) - run.count * session.id_bytes
        ids = ids_tensor(memoryview(work.payload)[start:], session.id_bytes)
        own = slice(work.offset, work.offset + rows)
        state = None
        if width:
            state = torch.frombuffer(
                work.payload, dtype=DTYPES[session.wire], count=run.count * width
            )
            state = state.view(1, run.count, width)[:, own].float().to(device)
        # Of the wanted positions those in this piece; a ring passes on all of them.
        wanted = run.count if session.forwards or not run.wanted else run.wanted
        here = max(0, min(rows, work.offset + rows - (run.count - wanted)))
        return Rows(
            session.memory,
            session.blocks,
            run.start + work.offset,
            ids[own][None].to(device),
            state,
            run.tail,
            here,
        )
