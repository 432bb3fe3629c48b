# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Passwords in URLs, which no module takes."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shard_sync", {"state": "fetched", "url": "https://me:hidden@example.org/x", "names": ["a"]}),
        ("trainer_venv", {"torch_index": "https://me:hidden@example.org/x"}),
    ],
)
def test_no_module_takes_a_password_in_a_url_or_shows_it(name, options, run_module, tmp_path):
    module = importlib.import_module(f"ansible_collections.nanochat.ddp.plugins.modules.{name}")
    result = run_module(module, path=str(tmp_path / "x"), host="desktop", **options)
    assert (
        result["failed"] and "a URL with a password or token in it" in result["msg"] and "hidden" not in result["msg"]
    )
    assert not (tmp_path / "x").exists()
