# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every file of the plugins can be imported with this Python and this ansible-core."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
FILES = sorted(path for path in PLUGINS.rglob("*.py") if "doc_fragments" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PLUGINS)))
def test_import(path: Path) -> None:
    name = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
    importlib.import_module(f"ansible_collections.nanochat.ddp.plugins.{name}")
