# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands, run from trainer/ with `python -m scripts.NAME`."""

import os

# Read by torch on import. Its warnings contain C++ stacks; we report the same problems in a sentence.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
