# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions of Python and uv, and the room that the trainer's environment takes."""

from __future__ import annotations

# Python versions for the trainer, the most certain to have a wheel of every package first.
PYTHONS = ("3.11", "3.12", "3.13", "3.10", "3.14")
# What makes the trainer's environment, and the Python that it installs where the host's own are too old.
UV, MADE_PYTHON = "uv==0.13.9", "3.12"
# Disk space of the trainer's Python with its packages.
VENV_BYTES = 1_600_000_000
