# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keepers talk to each other over real sockets, and to nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, talk
from ansible_collections.nanochat.ddp.tests.integration.local import free_port, until

PATIENCE = 60
SECRET = "s" * 40
LAUNCH = "12ab"


@pytest.fixture
def talks():
    """Makes the talks of the desktop, which has something to say, and of the laptop; closes them after the test."""
    made = []

    def make(address="127.0.0.1"):
        one, other = (talk.KeeperAddress(host, address, free_port()) for host in ("desktop", "laptop"))
        made.extend([talk.Messenger(one, (other,), SECRET, LAUNCH), talk.Messenger(other, (one,), SECRET, LAUNCH)])
        made[0].publish(membership.KeeperState("desktop"))
        return made

    yield make
    for one in made:
        one.close()


def fetched(laptop, keeper, known=""):
    """The answer to one question."""

    async def ask():
        peer = talk.Peer(keeper)
        peer.known = known
        return await laptop.fetch(peer)

    return asyncio.run(ask())


def silence(laptop, keeper):
    """Why there is no answer to one question."""

    async def ask():
        await laptop._hear(talk.Peer(keeper), 1)

    asyncio.run(ask())
    return laptop.silent.get(keeper.host)


def until_answered(laptop, keeper):
    """The word of a talk whose thread has just been started."""
    until(lambda: not silence(laptop, keeper), PATIENCE)
    return laptop.received.get_nowait()


def test_nobody_is_told_without_the_secret(talks):
    desktop, laptop = talks()
    alone = membership.Generation(2, ("desktop",))
    desktop.publish(membership.KeeperState("desktop", steps=7, generation=alone, hears=("laptop",)))
    desktop.start()
    public = until_answered(laptop, desktop.me)
    assert (public.steps, public.generation, public.hears) == (7, alone, ("laptop",))
    stranger = talk.Messenger(laptop.me, (desktop.me,), "another secret", "34cd")
    assert silence(stranger, desktop.me).startswith("desktop is of another start of the run (12ab, here 34cd)")
    with socket.create_connection(("127.0.0.1", desktop.me.port)) as link:
        link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert link.recv(100) == b""
    assert silence(laptop, desktop.me._replace(port=free_port())) == "desktop is up, but no keeper runs there"


def test_an_answer_is_good_for_its_question_only(talks):
    desktop, dummy = talks()
    asked = {"from": "laptop", "nonce": "1", "proof": talk.sign(SECRET, "ask", "laptop", "desktop", "1")}
    answer = json.loads(asyncio.run(desktop.answer(asked)))
    assert answer["proof"] == talk.sign(SECRET, "word", "desktop", "1", answer["word"])
    assert answer["proof"] != talk.sign(SECRET, "word", "desktop", "2", answer["word"])
    assert json.loads(asyncio.run(desktop.answer({**asked, "nonce": "2"}))) == {"launch": LAUNCH}


def test_news_is_told_at_once_and_steps_are_none(talks):
    desktop, laptop = talks()
    desktop.every = PATIENCE
    public = membership.KeeperState("desktop", steps=7)
    desktop.publish(public)
    desktop.start()
    known = talk.news_of(until_answered(laptop, desktop.me))
    received = []
    waiting = threading.Thread(target=lambda: received.append(fetched(laptop, desktop.me, known)))
    waiting.start()
    desktop.publish(public._replace(steps=8))
    waiting.join(0.5)
    assert not received
    desktop.publish(public._replace(steps=9, state="idle", promised=1))
    waiting.join(PATIENCE)
    assert [one.promised for one in received] == [1]


def test_a_keeper_that_hangs_is_not_heard(talks, monkeypatch):
    desktop, laptop = talks()
    desktop.start()
    assert until_answered(laptop, desktop.me).host == "desktop"
    monkeypatch.setattr(talk, "FRESH_SECONDS", -1.0)
    assert silence(laptop, desktop.me) == "the keeper of desktop hangs"


def test_an_address_that_is_not_planned_is_not_answered(talks):
    """The peer asks from its planned address, though the kernel would take another."""
    desktop, laptop = talks(address="127.0.0.3")
    desktop.start()
    assert until_answered(laptop, desktop.me).host == "desktop"
    with socket.create_connection(("127.0.0.3", desktop.me.port), 5, ("127.0.0.9", 0)) as stranger:
        assert stranger.recv(1) == b""


def test_a_port_that_is_taken_is_waited_for_and_why_a_peer_is_not_heard_is_told_until_it_is(talks, monkeypatch):
    monkeypatch.setattr(talk, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(talk, "LATE_SECONDS", 0.5)
    desktop, laptop = talks()
    desktop.every = laptop.every = 0.1
    with socket.create_server(("127.0.0.1", desktop.me.port)):
        desktop.start()
        laptop.start()
        until(lambda: "desktop" in desktop.silent, PATIENCE)
        reason = desktop.silent["desktop"]
        assert reason.startswith("cannot listen: ") and f"{desktop.me.port}): " in reason and "already in use" in reason
        until(lambda: "desktop" in laptop.silent, PATIENCE)
    assert laptop.received.get(timeout=PATIENCE).host == "desktop"
    until(lambda: "desktop" not in laptop.silent, PATIENCE)


# -- what others say

RULES = membership.Rules(("desktop", "laptop"), 1, 30.0, 300.0)
TRUE = {
    "state": "training", "generation": [3, ["desktop", "laptop"]], "promised": 3, "steps": 7, "hears": ["laptop"], "why": "x",
}  # fmt: skip


def read(now=1.8e9, **changes):
    """A word of the desktop with these changes, as the laptop reads it."""
    public = {**json.loads(talk.to_text(membership.KeeperState("desktop"))), **TRUE, **changes}
    return talk.to_state(json.dumps(public), RULES.hosts, now)


@pytest.mark.parametrize("generation", [[3, ["desktop", "laptop"]], [3, ["desktop"]], None])
def test_a_word_of_an_honest_keeper_is_taken(generation):
    public = read(generation=generation)
    assert (public.steps, public.generation and public.generation.number) == (7, generation and 3)


HOSTILE = [
    {"host": "elsewhere"}, {"generation": [3, ["desktop", "../../x"]]}, {"generation": [3, []]}, {"generation": [3, ["laptop", "laptop"]]},
    {"generation": [-1, ["laptop"]]}, {"generation": [10**400, ["laptop"]]}, {"generation": [3, [["laptop"]]]}, {"promised": "9"},
    {"generation": [2.5, ["laptop"]]}, {"generation": 5}, {"generation": 0}, {"last": [10**30, ["laptop"]]}, {"last": [3, ["elsewhere"]]},
    {"last": [2**53 - 1, ["laptop"]]}, {"promised": 2**53 - 1}, {"promised": 2 * 10**9 + 10**8}, {"regroup": 2**52}, {"outranked": 2**52},
    {"promised": 1e308}, {"promised": True}, {"steps": None}, {"steps": -5}, {"apart": "yes"}, {"hears": ["elsewhere"]}, {"hears": [{}]},
    {"hears": [1]}, {"left": [None]}, {"why": "x" * 10**4}, {"why": 5}, {"state": ["idle"]}, {"state": "king"}, {"generation": []},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda change: ascii(change)[:60])
def test_a_word_that_cannot_be_is_refused(changes):
    with pytest.raises((ValueError, KeyError, TypeError)):
        read(**changes)


def test_who_knows_the_secret_but_says_nonsense_is_silent_to_the_others(talks):
    desktop, laptop = talks()
    desktop.start()
    until_answered(laptop, desktop.me)
    for host in ("elsewhere", "laptop"):
        desktop._said = (time.monotonic(), talk.to_text(membership.KeeperState(host)), "x")
        assert silence(laptop, desktop.me) == "desktop sent an invalid answer"


def test_the_highest_promise_that_is_believed_leaves_numbers_for_the_others():
    """Who numbers above it is heard again as soon as the clock has gone on by as many seconds."""
    now = 1.8e9
    lie = read(now, promised=int(now) + talk.AHEAD_SECONDS)
    number = membership.next_number(RULES, membership.OwnState(membership.KeeperState("laptop")), {"desktop": lie})
    honest = membership.KeeperState("laptop", promised=number, generation=membership.Generation(number, ("laptop",)))
    assert talk.to_state(talk.to_text(honest), RULES.hosts, now + len(RULES.hosts)) == honest


def test_an_address_that_the_host_does_not_have_yet_is_waited_for(talks, monkeypatch):
    late = talk.KeeperAddress("desktop", "203.0.113.7", free_port())
    desktop = talk.Messenger(late, (talk.KeeperAddress("laptop", "127.0.0.1", free_port()),), SECRET, LAUNCH)
    desktop.start()
    until(lambda: "desktop" in desktop.silent, PATIENCE)
    desktop.close()
    assert desktop.silent["desktop"].startswith("cannot listen: ") and "203.0.113.7" in desktop.silent["desktop"]
    assert silence(desktop, desktop.others[0]) == "this host does not have its address 203.0.113.7 yet"


def answered_by(reply):
    """The outcome of a talk with a peer that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = talk.KeeperAddress("desktop", "127.0.0.1", server.getsockname()[1])
        laptop = talk.Messenger(talk.KeeperAddress("laptop", "127.0.0.1", free_port()), (peer,), SECRET, LAUNCH)

        def serve():
            link = server.accept()[0]
            link.recv(4096)
            reply(link)
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        said = silence(laptop, peer)
        thread.join()
        return said


def test_what_is_no_keeper_is_told_as_such(monkeypatch):
    assert answered_by(lambda link: link.sendall(b"220 smtp\n")) == "desktop sent an invalid answer"
    monkeypatch.setattr(talk, "LATE_SECONDS", -0.7)
    # A slow peer does not block a thread for longer.
    assert answered_by(lambda link: time.sleep(2)) == "desktop does not answer"


def test_late_answers_are_not_waited_for_and_do_not_follow_later_ones(talks):
    laptop = talks()[1]
    laptop.every = 0.05
    asked = []

    async def fetch(peer):
        asked.append(peer)
        number = len(asked)
        if number < 4:
            await asyncio.sleep(0.5 - number / 10)  # the first answer comes last
        return membership.KeeperState("desktop", steps=number)

    laptop.fetch = fetch
    laptop.start()
    steps = [laptop.received.get(timeout=PATIENCE).steps for dummy in range(20)]
    assert steps == sorted(steps)
    assert steps[0] >= 4
