# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How keepers hear of each other: each asks every other one for its word, once a second, over TCP.

The asker sends a number that is used once, signed; the answer is the other's word, signed together with that number. So
nothing that was recorded earlier passes for a word, and the secret of the run never crosses the network. A keeper
listens on the planned address only and reads what comes from the addresses of the plan only. Threads share nothing with
the keeper but a queue of what was heard, and the one word that is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import queue
import secrets
import socket
import socketserver
import threading
import time
from typing import Any, NamedTuple, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership

LONGEST = 65536
SECONDS = 2.0  # for a whole question and its answer


class Peer(NamedTuple):
    """Where a keeper listens."""

    host: str
    address: str
    port: int


def sign(secret: str, *parts: str) -> str:
    """The proof that whoever wrote these parts knows the secret."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def to_text(word: membership.Word) -> str:
    return json.dumps(word._asdict(), sort_keys=True)


def to_word(text: str) -> membership.Word:
    """ValueError, KeyError or TypeError where this is no word."""
    told = json.loads(text)
    generation = told["generation"]
    known = {name: told[name] for name in membership.Word._fields}
    known["generation"] = membership.Generation(int(generation[0]), tuple(generation[1])) if generation else None
    known.update(hears=tuple(told["hears"]), left=tuple(told["left"]))
    return membership.Word(**known)


class Talk:
    """Both directions: `say` what is to be told, and find in `heard` what was told."""

    def __init__(self, me: Peer, others: Tuple[Peer, ...], secret: str, every: float = 1.0) -> None:
        self.me, self.others, self.secret, self.every = me, others, secret, every
        self.heard: queue.Queue[membership.Word] = queue.Queue()
        self._text = ""
        self._over = threading.Event()
        self.server = _Server(me, self)

    def say(self, word: membership.Word) -> None:
        """What whoever asks is told from now on."""
        self._text = to_text(word)

    def start(self) -> None:
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()
        for peer in self.others:
            threading.Thread(target=self._ask_for_ever, args=(peer,), daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self.server.shutdown()
        self.server.server_close()

    def _ask_for_ever(self, peer: Peer) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            # A peer that is off, or says what is no word, was not heard.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                word = self.ask(peer)
                if word is not None and word.host == peer.host:
                    self.heard.put(word)
            self._over.wait(max(0.1, self.every - (time.monotonic() - begun)))

    def ask(self, peer: Peer) -> membership.Word | None:
        """The word of a peer; None if the answer is not the peer's."""
        nonce = secrets.token_hex(16)
        question = {
            "from": self.me.host,
            "nonce": nonce,
            "proof": sign(self.secret, "ask", self.me.host, peer.host, nonce),
        }
        with socket.create_connection((peer.address, peer.port), SECONDS) as link:
            link.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(_line(link))
        if not hmac.compare_digest(sign(self.secret, "word", peer.host, nonce, answer["word"]), answer["proof"]):
            return None
        return to_word(answer["word"])

    def answer(self, question: Document) -> bytes:
        """Our word, for who knows the secret; nothing for anybody else."""
        asker, nonce = str(question["from"]), str(question["nonce"])
        proof = sign(self.secret, "ask", asker, self.me.host, nonce)
        if not self._text or not hmac.compare_digest(proof, str(question["proof"])):
            return b""
        signed = sign(self.secret, "word", self.me.host, nonce, self._text)
        return json.dumps({"word": self._text, "proof": signed}).encode() + b"\n"


def _line(link: socket.socket) -> bytes:
    """One line, within the time of a question."""
    until, data = time.monotonic() + SECONDS, b""
    while not data.endswith(b"\n") and len(data) < LONGEST:
        link.settimeout(max(0.01, until - time.monotonic()))
        piece = link.recv(4096)
        if not piece:
            break
        data += piece
    return data


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self.request.sendall(self.server.talk.answer(json.loads(_line(self.request))))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, me: Peer, talk: Talk) -> None:
        self.talk = talk
        self.address_family = socket.AF_INET6 if ":" in me.address else socket.AF_INET
        self.allow = {_plain(peer.address) for peer in talk.others}
        super().__init__((me.address, me.port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return _plain(client_address[0]) in self.allow

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away in the middle is nothing to tell about."""


def _plain(address: str) -> str:
    found = ipaddress.ip_address(address.split("%")[0])
    return str(getattr(found, "ipv4_mapped", None) or found)
