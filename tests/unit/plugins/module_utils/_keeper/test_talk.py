# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keepers talk to each other over real sockets, and to nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, talk
from ansible_collections.nanochat.ddp.tests.integration.local import free_port, until

PATIENCE = 60
SECRET = "s" * 40
LAUNCH = "12ab"


@pytest.fixture
def two_talks():
    """Makes the talks of the desktop, which has something to say, and of the laptop; closes them after the test."""
    made = []

    def make(address="127.0.0.1"):
        one, other = (talk.KeeperAddress(host, address, free_port()) for host in ("desktop", "laptop"))
        made.extend([talk.Messenger(one, (other,), SECRET, LAUNCH), talk.Messenger(other, (one,), SECRET, LAUNCH)])
        made[0].say(membership.Word("desktop"))
        return made

    yield make
    for one in made:
        one.close()


def until_answered(asker, peer):
    """The word of a talk whose thread has just been started."""

    def answer():
        with contextlib.suppress(ConnectionRefusedError):
            return asker.ask(peer)
        return None

    return until(answer, PATIENCE)


def test_nobody_is_told_without_the_secret(two_talks):
    told, asker = two_talks()
    told.say(membership.Word("desktop", steps=7, generation=membership.Generation(2, ("desktop",)), hears=("laptop",)))
    told.start()
    word = until_answered(asker, told.me)
    assert (word.steps, word.generation.members, word.hears) == (7, ("desktop",), ("laptop",))
    stranger = talk.Messenger(asker.me, (told.me,), "another secret", "34cd")
    with pytest.raises(talk.NoWord):
        stranger.ask(told.me)
    assert stranger._hear(told.me).silent.startswith("desktop is of another start of the run (12ab, here 34cd)")
    with socket.create_connection(("127.0.0.1", told.me.port)) as link:
        link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert link.recv(100) == b""
    assert asker._hear(told.me._replace(port=free_port())).silent == "desktop is up, but no keeper runs there"


def test_an_answer_is_good_for_its_question_only(two_talks):
    told, dummy = two_talks()
    asked = {"from": "laptop", "nonce": "1", "proof": talk.sign(SECRET, "ask", "laptop", "desktop", "1")}
    answer = json.loads(told.answer(asked))
    assert answer["proof"] == talk.sign(SECRET, "word", "desktop", "1", answer["word"])
    assert answer["proof"] != talk.sign(SECRET, "word", "desktop", "2", answer["word"])
    assert json.loads(told.answer({**asked, "nonce": "2"})) == {"launch": LAUNCH}


def test_news_is_told_at_once_and_steps_are_none(two_talks):
    told, asker = two_talks()
    told.every = PATIENCE
    word = membership.Word("desktop", steps=7)
    told.say(word)
    told.start()
    known = talk.news_of(until_answered(asker, told.me))
    asker.every, heard = PATIENCE, []
    waiting = threading.Thread(target=lambda: heard.append(asker.ask(told.me, known)))
    waiting.start()
    told.say(word._replace(steps=8))
    waiting.join(0.5)
    assert not heard
    told.say(word._replace(steps=9, state="idle", promised=1))
    waiting.join(PATIENCE)
    assert [one.promised for one in heard] == [1]


def test_a_keeper_that_hangs_is_not_heard(two_talks, monkeypatch):
    told, asker = two_talks()
    told.start()
    assert until_answered(asker, told.me).host == "desktop"
    monkeypatch.setattr(talk, "FRESH_SECONDS", -1.0)
    assert asker._hear(told.me).silent == "the keeper of desktop hangs"


def test_the_planned_address_asks_though_the_kernel_would_take_another(two_talks, monkeypatch):
    told, asker = two_talks(address="127.0.0.3")
    seen = []
    told.start()
    original = talk._Server._place

    def place(self, address):
        seen.append(address[0])
        return original(self, address)

    monkeypatch.setattr(talk._Server, "_place", place)
    assert until_answered(asker, told.me).host == "desktop"
    assert set(seen) == {"127.0.0.3"}


def test_strangers_are_bounded_and_keep_no_peer_out(two_talks):
    told, asker = two_talks(address="127.0.0.3")
    told.start()
    until_answered(asker, told.me)
    with contextlib.ExitStack() as stack:
        links = [
            stack.enter_context(socket.create_connection(("127.0.0.3", told.me.port), 5, ("127.0.0.9", 0)))
            for dummy in range(3 * talk.STRANGERS)
        ]
        # Strangers beyond the limit are refused at once, not when a question would time out.
        begun = time.monotonic()
        assert links[-1].recv(1) == b""
        assert time.monotonic() - begun < talk.LATE_SECONDS
        assert asker.ask(told.me).host == "desktop"


def test_a_port_that_is_taken_is_waited_for(two_talks, monkeypatch):
    monkeypatch.setattr(talk, "RETRY_SECONDS", 0.1)
    told, asker = two_talks()
    with socket.create_server(("127.0.0.1", told.me.port)):
        told.start()
        until(lambda: "desktop" in told.silent, PATIENCE)
        assert told.silent["desktop"] == "cannot listen on 127.0.0.1 port %d: Address already in use" % told.me.port
    assert until_answered(asker, told.me).host == "desktop"


@pytest.mark.parametrize(("address", "other"), [("203.0.113.7", "127.0.0.1"), ("2001:db8::7", "::1")])
def test_an_address_that_comes_late_is_listened_on_already(address, other):
    if other == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    late = talk.KeeperAddress("desktop", address, free_port())  # which no host has
    told = talk.Messenger(late, (talk.KeeperAddress("laptop", other, free_port()),), SECRET, LAUNCH)
    with talk._Server(told) as server:
        assert server.server_address[:2] == (address, late.port)
    assert told._hear(told.others[0]).silent == f"this host does not have its address {address} yet"


def test_why_a_peer_is_not_heard_is_told_until_it_is_heard(two_talks):
    told, asker = two_talks()
    asker.every = 0.1
    asker.start()
    until(lambda: "desktop" in asker.silent, PATIENCE)
    told.start()
    assert asker.heard.get(timeout=PATIENCE).host == "desktop"
    until(lambda: "desktop" not in asker.silent, PATIENCE)


def answered_by(reply):
    """The outcome of a talk with a peer that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = talk.KeeperAddress("desktop", "127.0.0.1", server.getsockname()[1])
        asker = talk.Messenger(talk.KeeperAddress("laptop", "127.0.0.1", free_port()), (peer,), SECRET, LAUNCH)

        def serve():
            link = server.accept()[0]
            link.recv(4096)
            reply(link)
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        said = asker._hear(peer).silent
        thread.join()
        return said


def test_what_is_no_keeper_is_told_as_such(monkeypatch):
    assert answered_by(lambda link: link.sendall(b"220 smtp\n")) == "desktop sent an invalid answer"
    monkeypatch.setattr(talk, "LATE_SECONDS", 0.3)
    # A slow peer does not block a thread for longer.
    assert answered_by(lambda link: time.sleep(2)) == "desktop does not answer"


def test_questions_go_over_one_connection_until_the_peer_ends_it(two_talks):
    told, asker = two_talks()
    told.start()
    until_answered(asker, told.me)
    (link,) = asker._links[told.me]
    asker.ask(told.me)
    assert asker._links[told.me] == [link]
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1, socket.MSG_PEEK) == b""
    asker.ask(told.me)
    assert asker._links[told.me] != [link]


def test_late_answers_are_not_waited_for_and_do_not_follow_later_ones(two_talks, monkeypatch):
    monkeypatch.setattr(talk, "SECONDS", 0.05)
    asker = two_talks()[1]
    asker.every = 0.05
    asked, several = [], threading.Event()

    def ask(peer, known=""):
        asked.append(peer)
        number = len(asked)
        if number < 4:
            several.wait(PATIENCE)
            time.sleep(0.5 - number / 10)  # the first answer comes last
        several.set()
        return membership.Word("desktop", steps=number)

    asker.ask = ask
    asker.start()
    steps = [asker.heard.get(timeout=PATIENCE).steps for dummy in range(20)]
    assert steps == sorted(steps)
    assert steps[0] >= 4
