# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How keepers hear of each other: each asks every other one for its state, once a second, over TCP. The question says which state
the asker knows already; the answer comes as soon as there is news, or after a second. On a link that the ranks saturate an
answer may take many seconds, so the next question does not wait for it: answers are late, but as frequent as on other links.

The asker sends a signed one-time nonce; the answer is the other's state, signed together with the nonce. So
no recorded message is accepted later, and the run's secret never crosses the network. A keeper listens
only on the planned address, and connects from it. Clients that cannot prove to know the secret get the id of this start of the
run and nothing else. Threads share with the keeper only a queue of received messages, the one state to publish, and
why a peer is not heard.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import queue
import re
import secrets
import select
import socket
import socketserver
import threading
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from .._contract.document import Document
from . import membership
from .wire import to_state, to_text

LONGEST = 65536
QUESTION = 4096  # bytes; limit for unauthenticated data
SECONDS = 2.0  # without an answer, ask again
LATE_SECONDS = 10.0  # an answer later than this is not waited for
RETRY_SECONDS = 2.0  # between attempts to listen
# A state is published for this long after the keeper last confirmed it; a hanging keeper falls silent.
FRESH_SECONDS = 6.0
STRANGERS = 8  # simultaneous connections from addresses that are not planned, so that these cannot block the peers
PAUSE_SECONDS = 0.02  # between news and the next question
NO_ANSWER, INVALID = "%s does not answer", "%s sent an invalid answer"
LAUNCH = re.compile("[0-9a-f]{1,64}")
FREEBIND_4, FREEBIND_6 = (socket.IPPROTO_IP, 15), (socket.IPPROTO_IPV6, 78)  # of linux/in.h and in6.h


class KeeperAddress(NamedTuple):
    """Where a keeper listens."""

    host: str
    address: str
    port: int


class _Answer(NamedTuple):
    """The outcome of a question, numbered in the order of asking: a message and the key of its news, or why there is none."""

    number: int = 0
    public: Optional[membership.KeeperState] = None
    news: str = ""
    silent: str = ""


def sign(secret: str, *parts: str) -> str:
    """Proves that the author of these parts knows the secret."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def news_of(public: membership.KeeperState) -> str:
    """Key of a message's news; a change of steps alone is none."""
    return hashlib.sha256(to_text(public._replace(steps=0)).encode()).hexdigest()


class Messenger:
    """Both directions: `publish` tells a state, `heard` receives others'."""

    def __init__(self, me: KeeperAddress, others: Tuple[KeeperAddress, ...], secret: str, launch: str) -> None:
        self.me, self.others, self.secret, self.launch = me, others, secret, launch
        self.hosts = {one.host for one in (me, *others)}
        self.every = 1.0  # seconds between questions, and until an answer without news
        self.received: queue.Queue[membership.KeeperState] = queue.Queue()
        self.silent: Dict[str, str] = {}  # why a peer is not heard, by host; this host if it cannot listen
        self._links: Dict[KeeperAddress, List[socket.socket]] = {}
        self._said = (0.0, "")
        self._news = ""
        self._changed = threading.Condition()
        self.over = threading.Event()

    def publish(self, public: membership.KeeperState) -> None:
        """Publish this state; it expires unless it is confirmed repeatedly."""
        with self._changed:
            self._said, self._news = (time.monotonic(), to_text(public)), news_of(public)
            self._changed.notify_all()

    def start(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        for peer in self.others:
            threading.Thread(target=self._poll, args=(peer,), daemon=True).start()

    def close(self) -> None:
        self.over.set()

    def _listen(self) -> None:
        """Answer until the end. A port that another process holds may be free a moment later."""
        while not self.over.is_set():
            try:
                with _Server(self) as server:
                    self.silent.pop(self.me.host, None)
                    while not self.over.is_set():
                        server.handle_request()
            except OSError as error:
                self.silent[self.me.host] = "cannot listen on %s port %d: %s" % (
                    self.me.address, self.me.port, error.strerror or error,
                )  # fmt: skip
                self.over.wait(RETRY_SECONDS)

    def _poll(self, peer: KeeperAddress) -> None:
        answers: queue.Queue[_Answer] = queue.Queue()
        number, latest = 0, _Answer()
        while not self.over.is_set():
            begun, before, number = time.monotonic(), latest.news, number + 1
            with contextlib.suppress(RuntimeError):  # at the user's limit of threads: try again
                threading.Thread(target=self._put_answer, args=(answers, number, peer, before), daemon=True).start()
            answer = _newest(answers)
            if answer is None:
                self.silent[peer.host] = NO_ANSWER % peer.host
            # Otherwise it has been overtaken by the answer to a later question.
            elif answer.number > latest.number:
                latest = answer
                if answer.public is None:
                    self.silent[peer.host] = answer.silent
                else:
                    self.silent.pop(peer.host, None)
                    self.received.put(answer.public)
            waited = time.monotonic() - begun
            self.over.wait(PAUSE_SECONDS if latest.news not in ("", before) else max(0.1, self.every - waited))

    def _put_answer(self, answers: queue.Queue[_Answer], number: int, peer: KeeperAddress, known: str) -> None:
        answers.put(self._asked(peer, known)._replace(number=number))

    def _asked(self, peer: KeeperAddress, known: str = "") -> _Answer:
        """Ask a peer whose news are known up to this key."""
        try:
            public = self.fetch(peer, known)
            if public.host == peer.host:
                return _Answer(public=public, news=news_of(public))
            silent = INVALID % peer.host
        except ConnectionRefusedError:
            silent = "%s is up, but no keeper runs there" % peer.host
        except OSError as error:
            silent = NO_ANSWER % peer.host
            if error.errno == errno.EADDRNOTAVAIL:
                silent = "this host does not have its address %s yet" % self.me.address
        except NoState as error:
            silent = "%s is of another start of the run (%s, here %s): run train.yml with both" % (
                peer.host, error, self.launch,
            )  # fmt: skip
            if str(error) == self.launch:
                silent = "the keeper of %s hangs" % peer.host
        except (ValueError, KeyError, TypeError, RecursionError):
            silent = INVALID % peer.host
        return _Answer(silent=silent)

    def fetch(self, peer: KeeperAddress, known: str = "") -> membership.KeeperState:
        """A peer's state, at once if it differs from the known one.

        OSError, ValueError, KeyError, TypeError or NoState if there is none.
        """
        nonce = secrets.token_hex(16)
        question = {
            "from": self.me.host,
            "nonce": nonce,
            "known": known,
            "proof": sign(self.secret, "ask", self.me.host, peer.host, nonce),
        }
        until = time.monotonic() + LATE_SECONDS + self.every
        with self._link_to(peer) as link:
            link.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(_line(link, LONGEST, until))
        if "word" not in answer and LAUNCH.fullmatch(str(answer["launch"])):
            # Unsigned, so it is used only in text for people.
            raise NoState(answer["launch"])
        if not hmac.compare_digest(sign(self.secret, "word", peer.host, nonce, answer["word"]), answer["proof"]):
            raise ValueError("not signed by a keeper of this run")
        return to_state(answer["word"], self.hosts, time.time())

    @contextlib.contextmanager
    def _link_to(self, peer: KeeperAddress) -> Iterator[socket.socket]:
        """A connection for one question: one left open by an earlier question, which saves two of four trips, or a new one."""
        # Firewalls admit the planned addresses.
        link = self._left_open(peer) or socket.create_connection(
            (peer.address, peer.port), LATE_SECONDS, (self.me.address, 0)
        )
        try:
            yield link
        except BaseException:
            link.close()
            raise
        self._links[peer].append(link)

    def _left_open(self, peer: KeeperAddress) -> Optional[socket.socket]:
        left = self._links.setdefault(peer, [])
        while left:
            with contextlib.suppress(IndexError):  # another question has just taken the last one
                link = left.pop()
                if not _has_ended(link):
                    return link
                link.close()
        return None

    def answer(self, question: Document) -> bytes:
        """Our state for those who know the secret; otherwise only the id of this start."""
        asker, nonce = str(question["from"]), str(question["nonce"])
        proof = sign(self.secret, "ask", asker, self.me.host, nonce)
        proven = hmac.compare_digest(proof, str(question["proof"]))
        with self._changed:
            if proven:
                self._changed.wait_for(lambda: self._news != question.get("known"), self.every)
            said, text = self._said
        if not proven or not text or time.monotonic() - said > FRESH_SECONDS:
            return json.dumps({"launch": self.launch}).encode() + b"\n"
        signed = sign(self.secret, "word", self.me.host, nonce, text)
        return json.dumps({"word": text, "proof": signed}).encode() + b"\n"


def _newest(answers: queue.Queue[_Answer]) -> Optional[_Answer]:
    """The answer to the newest question, of those that arrive now."""
    found = []
    with contextlib.suppress(queue.Empty):
        found.append(answers.get(timeout=SECONDS))
        while True:
            found.append(answers.get_nowait())
    return max(found, key=lambda one: one.number, default=None)


class NoState(Exception):
    """The peer belongs to another start of the run, or hangs; contains the id of its start."""


def _line(link: socket.socket, longest: int, until: float) -> bytes:
    """One line, if it comes until then."""
    data = b""
    while not data.endswith(b"\n") and len(data) < longest:
        link.settimeout(max(0.01, until - time.monotonic()))
        piece = link.recv(4096)
        if not piece:
            break
        data += piece
    return data


def _has_ended(link: socket.socket) -> bool:
    """Whether the peer has closed a connection on which nothing is expected."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            while question := _line(self.request, QUESTION, time.monotonic() + LATE_SECONDS):
                if self.server.talk.over.is_set():
                    return
                self.request.sendall(self.server.talk.answer(json.loads(question)))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    timeout = 0.2  # of handle_request
    # With the default of 5, a burst of strangers delays a peer's connection by a second or more.
    request_queue_size = 128

    def __init__(self, talk: Messenger) -> None:
        self.talk = talk
        self.address_family = socket.AF_INET6 if ":" in talk.me.address else socket.AF_INET
        self.planned = {peer.address for peer in talk.others}
        self.strangers = threading.Semaphore(STRANGERS)
        super().__init__((talk.me.address, talk.me.port), _Handler)

    def server_bind(self) -> None:
        """Also bind an address that comes later: at boot the network may not be up yet."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(*(FREEBIND_6 if self.address_family == socket.AF_INET6 else FREEBIND_4), 1)
        super().server_bind()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self.planned or self.strangers.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            if client_address[0] not in self.planned:
                self.strangers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A disconnecting peer is not worth reporting."""
