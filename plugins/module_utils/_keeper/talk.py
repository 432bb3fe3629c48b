# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How keepers hear of each other: each asks every other one for its state, once a second, over TCP. The question says which state
the asker knows already; the answer comes as soon as there is news, or after a second. On a link that the ranks saturate an
answer may take many seconds, so the next question does not wait for it: answers are late, but as frequent as on other links.

The asker sends a signed one-time nonce; the answer is the other's state, signed together with the nonce. So
no recorded message is accepted later, and the run's secret never crosses the network. A keeper listens
only on the planned address, connects from it, and answers planned addresses alone. Clients that cannot prove to know the secret get
the id of this start of the run and nothing else. All this is done by one thread, which shares with the keeper only a queue of received
messages, the one state to publish, and why a peer is not heard. Signed by a host of the run, a state may still be nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import queue
import re
import secrets
import sys
import threading
import time
import traceback
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Set, Tuple

from .._contract import keeper_states as states
from .._contract.document import Document
from .._session.record import COME_BACK
from . import membership

LONGEST = 65536
QUESTION = 4096  # bytes; limit for unauthenticated data
LATE_SECONDS = 10.0  # an answer later than this is not waited for
RETRY_SECONDS = 2.0  # between attempts to listen
# A state is published for this long after the keeper last confirmed it; a hanging keeper falls silent.
FRESH_SECONDS = 6.0
PAUSE_SECONDS = 0.02  # between news and the next question
LOOK_SECONDS = 0.2  # between two looks whether the keeper has ended
NO_ANSWER, INVALID = "%s does not answer", "%s sent an invalid answer"
LAUNCH = re.compile("[0-9a-f]{1,64}")
# Of a state: the longest text in it, its parts, and the numbers of generations among them.
LONGEST_TEXT = 4096
DEFAULTS = membership.KeeperState("")._asdict()
NUMBERS = ("promised", "regroup", "outranked")
# Generations are numbered from 1; from the seconds since 1970 where a keeper has lost its memory. A number that lies further ahead than
# clocks differ is refused: as others number theirs above it, it would soon leave none that all accept.
AHEAD_SECONDS = 3600


class KeeperAddress(NamedTuple):
    """Where a keeper listens."""

    host: str
    address: str
    port: int


class NoState(Exception):
    """The peer belongs to another start of the run, or hangs; contains the id of its start."""


Link = Tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Peer:
    """A peer, with all that its questions share."""

    def __init__(self, keeper: KeeperAddress) -> None:
        self.keeper = keeper
        self.asked = self.answered = 0  # numbers of the newest question, and of the newest that has an outcome
        self.known = ""  # key of its news
        self.news = asyncio.Event()
        self.links: List[Link] = []  # left open by earlier questions, which saves two of four trips

    def left_open(self) -> Optional[Link]:
        """The last connection that the peer has not closed."""
        while self.links:
            link = self.links.pop()
            if not (link[0].at_eof() or link[1].is_closing()):
                return link
            link[1].close()
        return None


def to_text(public: membership.KeeperState) -> str:
    return json.dumps(public._asdict(), sort_keys=True)


def to_state(text: str, hosts: Collection[str], wall: float) -> membership.KeeperState:
    """The state in a text, if each part has its type and bounds and all hosts are in the plan; wall: seconds since 1970.

    ValueError, KeyError, TypeError or RecursionError otherwise.
    """
    given = json.loads(text)
    public = membership.KeeperState(**{name: _part(given[name], default, hosts) for name, default in DEFAULTS.items()})
    numbers = [one.number for one in (public.generation, public.last) if one] + [
        getattr(public, name) for name in NUMBERS
    ]
    if public.host not in hosts or public.state not in states.STATES or max(numbers) > int(wall) + AHEAD_SECONDS:
        raise ValueError("no keeper says this")
    return public


def _part(value: Any, default: Any, hosts: Collection[str]) -> Any:
    """A part of a state, if it has the type of its default (None: of a generation) and is within bounds."""
    if default is None and value is not None:
        number, members = value
        value = membership.Generation(_part(number, 0, hosts), _part(members, (), hosts))
        fits = len(value.members) == len(set(value.members)) > 0
    elif isinstance(default, tuple):
        fits = isinstance(value, list) and all(isinstance(one, str) and one in hosts for one in value)
        value = tuple(value)
    elif isinstance(value, str):
        fits = isinstance(default, str) and len(value) <= LONGEST_TEXT
    else:
        fits = type(value) is type(default) and (not value or 0 <= value < 2**53)
    if not fits:
        raise ValueError("no keeper says this")
    return value


def sign(secret: str, *parts: str) -> str:
    """Proves that the author of these parts knows the secret."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def news_of(public: membership.KeeperState) -> str:
    """Key of a message's news; a change of steps alone is none."""
    return hashlib.sha256(to_text(public._replace(steps=0)).encode()).hexdigest()


class Messenger:
    """Both directions: `publish` tells a state, `received` has those of others."""

    def __init__(self, me: KeeperAddress, others: Tuple[KeeperAddress, ...], secret: str, launch: str) -> None:
        self.me, self.others, self.secret, self.launch = me, others, secret, launch
        self.hosts = {one.host for one in (me, *others)}
        self.every = 1.0  # seconds between questions, and until an answer without news
        self.received: queue.Queue[membership.KeeperState] = queue.Queue()
        self.silent: Dict[str, str] = {}  # why a peer is not heard, by host; this host if it cannot listen
        self._said = (0.0, "", "")  # when it was said, the state as text, and the key of its news
        self._over = False
        self._loop: Optional[asyncio.AbstractEventLoop] = None  # of the thread, once it runs

    def publish(self, public: membership.KeeperState) -> None:
        """Publish this state; it expires unless it is confirmed repeatedly."""
        before, self._said = self._said[2], (time.monotonic(), to_text(public), news_of(public))
        if self._loop is not None and before != self._said[2]:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._let_answers_go)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._over = True

    def _run(self) -> None:
        """Without this thread the keeper would be deaf and mute: its session starts it again."""
        try:
            asyncio.run(self._talk())
        except Exception:  # pylint: disable=broad-except
            traceback.print_exc(file=sys.stdout)
            os._exit(COME_BACK)

    async def _talk(self) -> None:
        """Answer and ask until the end."""
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        talking = asyncio.gather(self._listen(), *(self._poll(Peer(one)) for one in self.others))
        while not (self._over or talking.done()):
            await asyncio.wait({talking}, timeout=LOOK_SECONDS)
        talking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await talking

    # -- answers

    async def _listen(self) -> None:
        """Listen for questions. At boot the host may not have its address yet, and a port that another process holds is free later."""
        while True:
            try:
                await asyncio.start_server(self._serve, self.me.address, self.me.port, limit=QUESTION)
                self.silent.pop(self.me.host, None)
                return
            except OSError as error:
                self.silent[self.me.host] = "cannot listen: %s" % (error.strerror or error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the questions of a connection; whatever is none ends it."""
        with contextlib.closing(writer), contextlib.suppress(Exception, asyncio.CancelledError):
            planned = [ipaddress.ip_address(peer.address) for peer in self.others]
            is_planned = ipaddress.ip_address(writer.get_extra_info("peername")[0]) in planned
            while is_planned and (question := await asyncio.wait_for(reader.readline(), LATE_SECONDS)):
                writer.write(await self.answer(json.loads(question)))
                await asyncio.wait_for(writer.drain(), LATE_SECONDS)

    async def answer(self, question: Document) -> bytes:
        """Our state for those who know the secret; otherwise only the id of this start."""
        asker, nonce = str(question["from"]), str(question["nonce"])
        proof = sign(self.secret, "ask", asker, self.me.host, nonce)
        proven = hmac.compare_digest(proof, str(question["proof"]))
        until = time.monotonic() + self.every
        while proven and question.get("known") == self._said[2] and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        at, text, dummy = self._said
        if not proven or not text or time.monotonic() - at > FRESH_SECONDS:
            return json.dumps({"launch": self.launch}).encode() + b"\n"
        signed = sign(self.secret, "word", self.me.host, nonce, text)
        return json.dumps({"word": text, "proof": signed}).encode() + b"\n"

    def _let_answers_go(self) -> None:
        """Those that wait for news."""
        self._news.set()
        self._news = asyncio.Event()

    # -- questions

    async def _poll(self, peer: Peer) -> None:
        """Ask a peer once a second, and at once after news."""
        asking: Set[asyncio.Task[None]] = set()
        while True:
            peer.asked += 1
            task = asyncio.create_task(self._hear(peer, peer.asked))
            asking.add(task)
            task.add_done_callback(asking.discard)
            await asyncio.sleep(PAUSE_SECONDS)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(peer.news.wait(), self.every)
            peer.news.clear()

    async def _hear(self, peer: Peer, number: int) -> None:
        """Ask a question, and receive its answer unless that was overtaken by the answer to a later one."""
        host = peer.keeper.host
        try:
            public, silent = await asyncio.wait_for(self.fetch(peer), LATE_SECONDS + self.every), ""
        except Exception as error:  # pylint: disable=broad-except
            public, silent = None, self._why_silent(host, error)
        if number < peer.answered:
            return
        peer.answered = number
        if public is None:
            self.silent[host] = silent
            return
        self.silent.pop(host, None)
        self.received.put(public)
        before, peer.known = peer.known, news_of(public)
        if before != peer.known:
            peer.news.set()

    def _why_silent(self, host: str, error: Exception) -> str:
        if isinstance(error, ConnectionRefusedError):
            return "%s is up, but no keeper runs there" % host
        if isinstance(error, NoState) and str(error) == self.launch:
            return "the keeper of %s hangs" % host
        if isinstance(error, NoState):
            other = (host, error, self.launch)
            return "%s is of another start of the run (%s, here %s): run train.yml with both" % other
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            return "this host does not have its address %s yet" % self.me.address
        return (NO_ANSWER if isinstance(error, (OSError, asyncio.TimeoutError)) else INVALID) % host

    async def fetch(self, peer: Peer) -> membership.KeeperState:
        """A peer's state, at once if it differs from the known one; whatever error if there is none."""
        to, nonce = peer.keeper, secrets.token_hex(16)
        proof = sign(self.secret, "ask", self.me.host, to.host, nonce)
        question = {"from": self.me.host, "nonce": nonce, "known": peer.known, "proof": proof}
        # Firewalls admit the planned addresses.
        link = peer.left_open() or await asyncio.open_connection(
            to.address, to.port, local_addr=(self.me.address, 0), limit=LONGEST
        )
        try:
            link[1].write(json.dumps(question).encode() + b"\n")
            answer = json.loads(await link[0].readline())
            if "word" not in answer and LAUNCH.fullmatch(str(answer["launch"])):
                # Unsigned, so it is used only in text for people.
                raise NoState(answer["launch"])
            if not hmac.compare_digest(sign(self.secret, "word", to.host, nonce, answer["word"]), answer["proof"]):
                raise ValueError("not signed by a keeper of this run")
            public = to_state(answer["word"], self.hosts, time.time())
            if public.host != to.host:
                raise ValueError("not signed for this keeper")
        except BaseException:
            link[1].close()
            raise
        peer.links.append(link)
        return public
