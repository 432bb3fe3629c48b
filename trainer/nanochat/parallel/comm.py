# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All communication between ranks: the only file that uses torch.distributed.

Tensors are sent over Gloo, small facts as JSON through the rendezvous store. Every exchange has a name and a timeout.

torch's store client waits forever if the store's host is frozen or cut off, so each query of it runs in a thread that can be abandoned.
Once a second each rank records its position in the store; when an exchange fails, this shows which rank did not arrive. In a single
process everything is a no-op.

    comm = connect(read_ranks(), "cpu", timeout=300)
    comm.all_reduce(tensor, "the loss")
    comm.close()
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from nanochat.kit.common import ENVIRON, Ranks, UserError, check_device, first_line
from nanochat.rules.causes import Cause

# Gloo gives up connecting only after five times its timeout; all ranks are present by then, so it is short.
CONNECT_SECONDS = 10.0
BEAT_SECONDS = 1.0
# Long enough for a live rank to send two heartbeats.
ROLL_CALL_SECONDS = 2.5 * BEAT_SECONDS
# A rank silent for this long after its last heartbeat is lost; so is a store that does not answer.
SILENCE_SECONDS = 30.0
# Maximum silence counted between two checks: a rank that was itself suspended heard nobody.
LOOK_SECONDS = 2.0
# For an optional query.
GLANCE_SECONDS = 1.0
# A rank that is alive but busy with disk or evaluation gets this many times the timeout of a collective.
PATIENCE = 20
# A caller that was suspended finds its time over, and an answer of the store a moment later.
GRACE_SECONDS = 0.5

# The heartbeat of a rank that has not sent any: count, host, phase, step, collective.
NEVER_SEEN = (0, "never seen", "start", -1, 0)

T = TypeVar("T")

# Called with the phase, the step and the number of the last exchange.
OnPhase = Callable[[str, int, int], None]


class CommError(UserError):
    """An exchange between ranks failed; the text names the rank, the phase and the remedy."""


class StoreSilent(RuntimeError):
    """The store did not answer in time."""


class RankStatus(NamedTuple):
    """A rank's last position, and whether it is alive."""

    rank: int
    name: str
    last: str
    collective: int
    alive: bool
    left: tuple[str, str, list[int]] | None  # error, cause and blamed ranks, by its own word, if it failed


def position(phase: str, step: int) -> str:
    """A rank's position, for messages."""
    return f"phase {phase} of step {step}" if step >= 0 else f"phase {phase}"


class Pending(NamedTuple):
    """A tensor in transit."""

    work: Any
    what: str


def connect(
    ranks: Ranks,
    device: str,
    timeout: float,
    environ: Mapping[str, str] = ENVIRON,
    on_phase: OnPhase = lambda phase, step, collective: None,
) -> Comm:
    """Join the other ranks at MASTER_ADDR:MASTER_PORT, if any; device: "cpu". on_phase is called for every phase."""
    check_device(device)
    if ranks.world == 1:
        return Comm(ranks, timeout, None, on_phase)
    on_phase("rendezvous", 0, 0)
    comm = Comm(ranks, timeout, _open_store(ranks, timeout, environ), on_phase)
    try:
        comm.enter("rendezvous")
        comm.exchange("rendezvous", None)
        _join_group(comm, environ)
    except BaseException:
        comm.stop_beating()
        raise
    return comm


def within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result or exception; StoreSilent if it takes too long."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        # The caller must see any error; otherwise it would wait in vain.
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="rendezvous", daemon=True).start()
    if not (futures.wait([answer], seconds).done or futures.wait([answer], GRACE_SECONDS).done):
        raise StoreSilent(f"no answer within {seconds:.0f} s")
    return answer.result()


def _open_store(ranks: Ranks, timeout: float, environ: Mapping[str, str]) -> Store:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"WORLD_SIZE={ranks.world}, but MASTER_ADDR and MASTER_PORT are not set; use torchrun.")
    # torchrun's agent on the first host serves the store; without an agent, rank 0 does.
    serves = ranks.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout)
    try:
        store = within(
            timeout + CONNECT_SECONDS,
            lambda: TCPStore(address, int(port), ranks.world, serves, limit, wait_for_workers=False, multi_tenant=True),
        )
    except (RuntimeError, dist.DistError) as error:
        taken, what, todo = "EADDRINUSE" in str(error), "serve", "stop it or choose another port."
        if not serves:
            what, todo = "reach", f"is rank 0 running there, and can this host reach port {port}?"
        why = "another process holds that port" if taken else _without_noise(error)
        raise CommError(
            f"rank {ranks.rank} ({socket.gethostname()}) could not {what} the rendezvous at {address}:{port} "
            f"within {timeout:g} s: {why}; {todo}",
            Cause.PORT_TAKEN if taken else Cause.STORE_LOST,
            [0],
        ) from None
    attempt, name = environ.get("TORCHELASTIC_RESTART_COUNT", "0"), environ.get("TORCHELASTIC_RUN_ID", "none")
    # A frozen rank of an earlier start that wakes up finds none of its keys here.
    return PrefixStore(f"nanochat/{name}/{attempt}", store)


def _join_group(comm: Comm, environ: Mapping[str, str]) -> None:
    seconds = min(CONNECT_SECONDS, comm.timeout / 5)
    limit = timedelta(seconds=seconds)
    try:
        comm.ask(
            lambda store: dist.init_process_group(
                "gloo", store=store, rank=comm.rank, world_size=comm.world, timeout=limit
            ),
            5 * seconds + comm.silence,
        )
    except (RuntimeError, dist.DistError) as error:
        nic = environ.get("GLOO_SOCKET_IFNAME")
        raise CommError(
            f"{comm.name} reached all {comm.world} ranks at the rendezvous, but could not open a data connection to any of them "
            f"within {5 * seconds:g} s ({_without_noise(error)}); open the hosts' firewalls for the ports of "
            f"net.ipv4.ip_local_port_range, and check that GLOO_SOCKET_IFNAME ({nic or 'not set'}) is the interface "
            "between them.",
            Cause.LINK_LOST,
            [],
        ) from None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=comm.timeout))


class Comm:
    """One process's rank and its exchanges with the others."""

    def __init__(
        self,
        ranks: Ranks,
        timeout: float,
        store: Store | None = None,
        on_phase: OnPhase = lambda phase, step, collective: None,
    ) -> None:
        self.rank, self.local_rank, self.world = ranks
        self.timeout = timeout
        self.store = store
        self.host = socket.gethostname()
        # Counts what all ranks do in the same order: phases and collectives, but not point-to-point messages.
        self.phase, self.step, self.collective = "start", -1, 0
        self.wait_seconds, self.bytes_sent = 0.0, 0
        # The tensors that this rank waits for, and since when; a thread that ends this rank during a wait holds the lock.
        self._waiting: tuple[str, float] | None = None
        self._may_go_on = threading.Lock()
        self._exchanges = 0
        self._on_phase = on_phase
        self._quiet = threading.Event()
        self._beacon = threading.Thread(target=self._beat, name="beacon", daemon=True)
        if store is not None:
            self._beacon.start()

    @property
    def name(self) -> str:
        """This rank's name in messages."""
        return f"rank {self.rank} ({self.host})"

    @property
    def silence(self) -> float:
        """Timeout in seconds for heartbeats and for the store."""
        return min(SILENCE_SECONDS, self.timeout)

    def ask(self, call: Callable[[Store], T], seconds: float | None = None) -> T:
        """Query the store, with a timeout."""
        store = self.store
        assert store is not None
        return within(self.silence if seconds is None else seconds, lambda: call(store))

    # -- this rank's position

    def enter(self, phase: str, step: int | None = None) -> None:
        """Set this rank's phase; costs one assignment."""
        self.phase = phase
        self.collective += 1
        self.step = self.step if step is None else step
        self._on_phase(self.phase, max(0, self.step), self.collective)

    def take_counters(self) -> tuple[float, int]:
        """Seconds waited and bytes sent since the last call."""
        taken = self.wait_seconds, self.bytes_sent
        self.wait_seconds, self.bytes_sent = 0.0, 0
        return taken

    # -- tensors

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sum over all ranks, in place."""
        self.wait(self.start_all_reduce(tensor, what))
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, what: str) -> Pending:
        """Start a sum over all ranks; every rank must start its sums in the same order."""
        self.collective += 1
        self.bytes_sent += 2 * (self.world - 1) * tensor.nbytes // self.world
        return self.launch(what, lambda: dist.all_reduce(tensor, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Send the source's tensor to every rank, in place."""
        self.collective += 1
        self.bytes_sent += tensor.nbytes if self.rank == source else 0
        self.wait(self.launch(what, lambda: dist.broadcast(tensor, source, async_op=True)))

    def send(self, tensor: torch.Tensor, to: int, tag: int, what: str) -> Pending:
        """Start sending a tensor, which must not change until it was waited for."""
        self.bytes_sent += tensor.nbytes
        return self.launch(what, lambda: dist.isend(tensor, to, tag=tag))

    def receive(self, into: torch.Tensor, source: int, tag: int, what: str) -> Pending:
        """Start receiving a tensor in place."""
        return self.launch(what, lambda: dist.irecv(into, source, tag=tag))

    def wait(self, *pending: Pending) -> None:
        """Wait for pending tensors; counts as waiting time."""
        begun, failed, what = time.perf_counter(), None, ""
        try:
            for one in pending:
                what, self._waiting = one.what, (one.what, begun)
                if one.work is not None:
                    # Otherwise point-to-point work would keep the short connection timeout.
                    one.work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            failed = error
        finally:
            with self._may_go_on:
                self._waiting = None
        if failed is not None:
            raise self._explain(what, failed, time.perf_counter() - begun)
        self.wait_seconds += time.perf_counter() - begun

    def waited(self) -> float:
        """Seconds for which this rank has been waiting for the same tensors; 0 if it is not waiting."""
        waiting = self._waiting
        return time.perf_counter() - waiting[1] if waiting is not None else 0.0

    def stop_waiting(self, seconds: float) -> bool:
        """Make a wait that has lasted so long last forever, so that another thread can end this rank; False if there is none."""
        self._may_go_on.acquire()
        if self.waited() > seconds:
            return True
        self._may_go_on.release()
        return False

    def explain_wait(self) -> CommError:
        """The error of a wait that lasts forever."""
        assert self._waiting is not None
        return self._explain(self._waiting[0], None, self.waited())

    def launch(self, what: str, start: Callable[[], Any]) -> Pending:
        """Start an exchange of torch.distributed that has no method here."""
        if self.world == 1:
            return Pending(None, what)
        try:
            return Pending(start(), what)
        except RuntimeError as error:
            raise self._explain(what, error, 0.0) from None

    # -- small facts

    def exchange(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        """Every rank's value, in rank order. patient: a live rank may take PATIENCE times the timeout."""
        mine = json.dumps(value)
        if self.store is None:
            return [json.loads(mine)]
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self.collective += 1
        begun = time.perf_counter()
        self._ask_or_explain(lambda store: store.set(f"x/{number}/{self.rank}", mine), what)
        found = [json.loads(self._await(f"x/{number}/{rank}", rank, what, patient)) for rank in range(self.world)]
        self.wait_seconds += time.perf_counter() - begun
        if number:
            # All ranks answered this exchange, so they have read the last one.
            self._ask_or_explain(lambda store: store.delete_key(f"x/{number - 1}/{self.rank}"), what)
        return found

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here; for phases in which a rank may be busy for long (saving, sampling)."""
        self.exchange(what, None, patient=True)

    def post(self, key: str) -> None:
        """Post a message that any rank may read."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError, dist.DistError):
            self.ask(lambda store: store.set(key, "1"))

    def posted(self, key: str) -> bool:
        """Whether any rank has posted that message; does not wait for a slow store."""
        if self.store is None:
            return False
        with contextlib.suppress(RuntimeError, dist.DistError):
            return self.ask(lambda store: store.check([key]), GLANCE_SECONDS)
        return False

    def _ask_or_explain(self, call: Callable[[Store], T], what: str) -> T:
        begun = time.monotonic()
        try:
            return self.ask(call)
        except (RuntimeError, dist.DistError) as error:
            raise self._explain(what, error, time.monotonic() - begun) from None

    def _await(self, key: str, rank: int, what: str, patient: bool) -> bytes:
        """The value of a key set by another rank; gives up if that rank has left or lost its heartbeat."""
        begun = looked = time.monotonic()
        limit, beat, silent = self.timeout * (PATIENCE if patient else 1), b"", 0.0
        while True:
            value, heard, left = self._ask_or_explain(lambda store: _look(store, key, rank), what)
            if value is not None:
                return value
            now = time.monotonic()
            silent = silent + min(now - looked, LOOK_SECONDS) if heard and heard == beat else 0.0
            beat, looked = heard, now
            if left or silent > self.silence or now - begun > limit:
                raise self._explain(what, None, now - begun)
            # As often as useful: a start has dozens of exchanges.
            time.sleep(min(0.1, max(0.001, (now - begun) / 8)))

    # -- the heartbeat in the store, which explains failed exchanges

    def _beat(self) -> None:
        assert self.store is not None
        for count in itertools.count():
            where = [count, self.host, self.phase, self.step, self.collective]
            # Retry with the next heartbeat: a store that comes back must hear from us.
            with contextlib.suppress(RuntimeError, dist.DistError):
                self.store.set(f"at/{self.rank}", json.dumps(where))
            if self._quiet.wait(BEAT_SECONDS):
                return

    def stop_beating(self) -> None:
        """Stop the heartbeat, so that this process can exit."""
        self._quiet.set()
        if self._beacon.is_alive():
            self._beacon.join(BEAT_SECONDS)

    def _explain(self, what: str, error: Exception | None, seconds: float) -> CommError:
        """Turn a failed exchange into a sentence that names the missing rank."""
        seen: list[RankStatus] = []
        if not isinstance(error, StoreSilent):
            # A silent store tells us nothing; that is handled below.
            with contextlib.suppress(RuntimeError, dist.DistError):
                seen = self.ask(self._roll_call, 2 * ROLL_CALL_SECONDS)
        why = f" ({_without_noise(error)})" if error is not None else ""
        at, (text, cause, blames) = position(self.phase, self.step), self._failure(seen)
        text = f"{self.name} stopped in {at}, after waiting {seconds:.0f} s for {what}{why}: {text}."
        return CommError(text, cause, blames)

    def _roll_call(self, store: Store) -> list[RankStatus]:
        others = [rank for rank in range(self.world) if rank != self.rank]
        first = {rank: _beat_of(store, rank) for rank in others}
        last, left, until = dict(first), dict.fromkeys(others, b""), time.monotonic() + ROLL_CALL_SECONDS
        while time.monotonic() < until and any(last[r] == first[r] and not left[r] for r in others):
            time.sleep(0.1)
            for rank in others:
                last[rank], left[rank] = _beat_of(store, rank), _value(store, f"left/{rank}") or b""
        rows = []
        for rank in others:
            dummy, host, phase, step, collective = json.loads(last[rank]) if last[rank] else NEVER_SEEN
            farewell = json.loads(left[rank]) if left[rank] else None
            name, at = f"rank {rank} ({host})", position(phase, step)
            rows.append(RankStatus(rank, name, at, collective, last[rank] != first[rank], farewell))
        return rows

    def _failure(self, seen: Sequence[RankStatus]) -> tuple[str, Cause, list[int]]:
        """What the others' states suggest as the error, its cause, and the ranks to blame."""
        if not seen:
            text = "the rendezvous no longer answers, so rank 0 or its host is gone; check there first, then resume"
            return text, Cause.STORE_LOST, [0]
        for rank in seen:
            if rank.left is not None:
                text, cause, blames = rank.left
                return f"{rank.name} failed: {text.rstrip('.')}", Cause(cause), blames
        silent = [rank for rank in seen if not rank.alive]
        if silent:
            names = " and ".join(f"{rank.name}, last seen in {rank.last}" for rank in silent)
            text = f"no heartbeat from {names}; check that its process, host and network are up, then resume"
            return text, Cause.PEER_LOST, [rank.rank for rank in silent]
        behind = [rank for rank in seen if rank.collective < self.collective]
        if behind:
            late = " and ".join(f"{rank.name} did not arrive; it is alive and in {rank.last}" for rank in behind)
            text = f"{late}; check what delays it, or raise --timeout-seconds"
            return text, Cause.PEER_LATE, [rank.rank for rank in behind]
        text = "every rank is alive and arrived, so the connection between them broke; check the network, then resume"
        return text, Cause.LINK_LOST, []

    # -- the end

    def give_up(self, reason: str, cause: Cause, blames: Sequence[int] | None) -> None:
        """Tell the others that this rank failed, so that they need not wait."""
        if self.store is None:
            return
        blamed = [self.rank] if blames is None else list(blames)
        word = json.dumps([" ".join(reason.split()), cause.value, blamed])
        with contextlib.suppress(RuntimeError, dist.DistError):
            self.ask(lambda store: store.set(f"left/{self.rank}", word), 2 * ROLL_CALL_SECONDS)
            # The rank that serves the store stays until the others have read it.
            time.sleep(ROLL_CALL_SECONDS if self.rank == 0 else 0.0)

    def close(self) -> None:
        """End together: nobody closes the store or a connection that another rank still needs."""
        if self.store is None:
            return
        what = "the end of the run"
        self.enter("end")
        self.barrier(what)
        self.stop_beating()
        dist.destroy_process_group()
        if self.rank == 0:
            for rank in range(1, self.world):
                self._await(f"bye/{rank}", rank, what, patient=False)
        else:
            self._ask_or_explain(lambda store: store.set(f"bye/{self.rank}", "1"), what)


def _value(store: Store, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


def _beat_of(store: Store, rank: int) -> bytes:
    return _value(store, f"at/{rank}") or b""


def _look(store: Store, key: str, rank: int) -> tuple[bytes | None, bytes, bool]:
    """A key's value if set, else the last heartbeat of the rank that sets it and whether it has left."""
    value = _value(store, key)
    return (value, b"", False) if value is not None else (None, _beat_of(store, rank), store.check([f"left/{rank}"]))


def _without_noise(error: Exception) -> str:
    """The library's message, without its source file, advice and stack."""
    noise = r"^\[[^\]]*\]\s*|\. This is .*$|\s*Exception raised from.*$"
    return re.sub(noise, "", first_line(error))[:120].rstrip(". ")
