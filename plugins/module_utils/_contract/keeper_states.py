# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of a keeper and the events that it records, shared by keepers and all readers of their files (docs/membership.md)."""

from __future__ import annotations

# Before and during training, and while leaving it.
IDLE, OFFERED, PROMISED, TRAINING, ENDING = "idle", "offered", "promised", "training", "ending"
BEFORE = (IDLE, OFFERED, PROMISED)
ASKING = "asking"  # its rank ended because a host was asked to stop; looking for the reason
STUCK = "stuck"  # its rank cannot be killed, or its disk not be written, so it takes part in nothing until that is over
RESTING = "resting"  # the machine is in use by others (ddp_polite guest); it comes back by itself
# The keeper ends. AWAY: its host shuts down and comes back by itself.
FINISHED, STOPPED, LEFT, FAILED, AWAY = "finished", "stopped", "left", "failed", "away"
OVER = (FINISHED, STOPPED, LEFT, FAILED, AWAY)
STATES = (IDLE, OFFERED, PROMISED, TRAINING, ENDING, ASKING, STUCK, RESTING, *OVER)

# Events besides state changes: a host is heard or lost, checkpoints were moved aside.
HEARD, LOST, GAVE_WAY = "heard", "lost", "gave way"
