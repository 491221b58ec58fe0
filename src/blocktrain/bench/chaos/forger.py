"""A client that submits what must not count, one after the other, and says what was answered."""

from __future__ import annotations

import random
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field

import httpx2

from blocktrain.bench.chaos.forgery import FORGERIES, Forged, ForgeryMaterial
from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.processes import Channel
from blocktrain.protocol import calls
from blocktrain.protocol import messages as m
from blocktrain.protocol.identity import Identity, identity_from_seed, new_nonce
from blocktrain.protocol.ledger import LeaseFacts, UpdateBody, read_body
from blocktrain.protocol.refusals import Refused
from blocktrain.protocol.transfer import sha256
from blocktrain.web.client import HttpClient, retry_later

REFRESH_SECONDS = 1.0  # between two looks at the public record
MOST_KNOWN = 50  # newest submissions and leases that forgeries are made of
PAUSE_SECONDS = 0.1
SECONDS = 10.0  # that an answer may take


@dataclass(frozen=True)
class ForgerJob:
    """How many to send, and in how many seconds. It reaches the coordinator without a proxy."""

    url: str
    count: int
    seconds: float
    seed: int


def forge(channel: Channel, job: ForgerJob) -> None:
    """Main function of the forger's process. Every submission gets an answer, however late."""
    with (
        closing(HttpClient(job.url, timeout=SECONDS)) as client,
        httpx2.Client(base_url=job.url, timeout=SECONDS) as line,
    ):
        forger = Forger(channel, client, line, random.Random(f"{job.seed}/forger"))
        began = time.monotonic()
        for number in range(job.count):
            while (ahead := began + number * job.seconds / job.count - time.monotonic()) > 0:
                time.sleep(min(ahead, PAUSE_SECONDS))
                if channel.should_stop:
                    return
            forger.send_one()
            if channel.should_stop:
                return


@dataclass
class Forger:
    """Keeps what forgeries are made of, and sends them."""

    channel: Channel
    client: HttpClient
    line: httpx2.Client
    draw: random.Random
    _recorded: list[m.Submission] = field(default_factory=list)
    _leased: list[LeaseFacts] = field(default_factory=list)
    _entries: set[str] = field(default_factory=set)  # of updates, as the ledger names them
    _seq: int = 0
    _looked: float = float("-inf")
    _run: str = ""
    _own: m.Task | None = None

    def __post_init__(self) -> None:
        self.member: Identity = identity_from_seed(self.draw.randbytes(32))
        self.stranger: Identity = identity_from_seed(self.draw.randbytes(32))

    def send_one(self) -> None:
        """One of the rows, until it is answered."""
        name = self.draw.choice(list(FORGERIES))
        while not self.channel.should_stop:
            try:
                material = self._material()
                if material is not None:
                    accepted, code = self._submit(FORGERIES[name](material))
                    self.channel.send(kind="forged", forgery=name, accepted=accepted, code=code)
                    return
            except BlockTrainError as error:
                if not retry_later(error):
                    raise
            time.sleep(PAUSE_SECONDS)

    def _submit(self, forged: Forged) -> tuple[bool, str]:
        """Whether it counts as new, and the code of the answer."""
        if forged.payload and self._own is not None:
            own, content = self._own, forged.payload
            with suppress(Refused):
                self.client.put_chunk(own.task, 0, own.ticket, content, sha256(content))
        try:
            answer = self.line.post(
                calls.SUBMIT.path, content=forged.body, headers={"Content-Type": calls.JSON}
            )
        except httpx2.HTTPError as error:
            raise Unreachable(str(error)) from None
        if answer.status_code == 200:
            receipt = m.read(m.SubmitReply, answer.content, m.MAX_REPLY).receipt
            known = receipt.entry in self._entries
            return receipt.accepted and not known, "old receipt" if known else "accepted"
        code = m.read(m.Refusal, answer.content, m.MAX_REPLY).code
        if retry_later(Refused(code)):
            raise Refused(code)
        return False, code.value

    def _material(self) -> ForgeryMaterial | None:
        """None until the record has something to forge."""
        if time.monotonic() - self._looked > REFRESH_SECONDS:
            self._look()
            self._join()
            self._looked = time.monotonic()
        if not (self._recorded and self._leased and self._run):
            return None
        own = (self._own.order, self._own.fence) if self._own else None
        return ForgeryMaterial(
            self._run,
            self.member,
            self.stranger,
            self._recorded[-MOST_KNOWN:],
            self._leased[-MOST_KNOWN:],
            own or (self._leased[-1].order, self._leased[-1].fence),
            self.draw,
        )

    def _look(self) -> None:
        while page := self.client.ledger(self._seq).entries:
            for entry in page:
                if entry.kind == "update":
                    self._recorded.append(read_body(UpdateBody, entry).submission)
                    self._entries.add(entry.hash)
                elif entry.kind == "lease":
                    lease = read_body(LeaseFacts, entry)
                    self._leased += [lease] if lease.worker != self.member.worker else []
            self._seq = page[-1].seq

    def _join(self) -> None:
        """As a member it gets tasks of its own; a restarted coordinator may have forgotten it."""
        hello = m.Join(
            protocol=m.PROTOCOL,
            public_key=self.member.public_key,
            name="forger",
            device="cpu",
            memory=1 << 30,
            speed=0.0,
            nonce=new_nonce(),
            time=0,
        )
        with suppress(Refused):  # the run is over
            reply = self.client.join(self.member.sign(hello))
            self._run = reply.run
            self._own = reply.next if isinstance(reply.next, m.Task) else self._own
