# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Passwords in URLs, which no module takes."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.modules import shard_sync


def test_no_module_takes_a_password_in_a_url_or_shows_it(run_module, tmp_path):
    options = {"path": str(tmp_path / "x"), "host": "desktop", "state": "fetched", "names": ["a"]}
    told = run_module(shard_sync, url="https://me:hidden@example.org/x", **options)
    assert told["failed"] and "a URL with a password or token in it" in told["msg"] and "hidden" not in told["msg"]
    assert not (tmp_path / "x").exists()
