# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The display of a playbook run: the job's steps, findings, and the run's progress."""

from __future__ import annotations

DOCUMENTATION = r"""
name: story
type: stdout
short_description: Show the progress of a training job instead of a task list
version_added: 0.1.0
description:
  - One line per step with a mark and its duration, findings as they occur, a live line during the run, and the
    closing table.
  - Shows complete errors with their host. In check mode everything that would change is listed; with C(--diff) the differences are shown.
  - With C(-v) Ansible's own output is shown instead. Set C(ANSIBLE_STDOUT_CALLBACK=default) to do without this plugin altogether.
  - Without a terminal, or with the environment variable E(NO_COLOR), the output is plain text, one line after another.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from ansible import constants as C
from ansible import context
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.callback import CallbackBase
from ansible.plugins.callback.default import CallbackModule as DefaultCallback
from ansible.utils.display import Display

from ..module_utils._kit.printable import printable
from ..module_utils._kit.words import seconds_text
from ..plugin_utils._agent.verbs import on_controller
from ..plugin_utils._display.progress import Ledger, ledger_of, run_line
from ..plugin_utils._display.steps import HEADING, Steps
from ..plugin_utils._display.terminal import MARKS, Terminal, hand_over
from ..plugin_utils._display.texts import (
    closing_text,
    error_text,
    finding_text,
    findings_in,
    sentence,
    task_name,
    unreachable_text,
)

display = Display()
DEBUG = ("debug", "ansible.builtin.debug", "ansible.legacy.debug")
COLORS = {"error": C.COLOR_ERROR, "warning": C.COLOR_WARN}


class _Named:
    """The plugin's name and kind."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "nanochat.ddp.story"
    plugin_type = "callback"  # which Ansible would derive from the name of the class


class AnsiblesOwn(_Named, DefaultCallback):
    """Ansible's own output, for -v."""

    def __init__(self) -> None:
        super().__init__()
        show = display.display
        display.display = lambda msg, *args, **options: show(printable(msg, colors=True), *args, **options)


class Story(_Named, CallbackBase):
    """Passes Ansible's events to the terminal, the steps and the run's progress."""

    def __init__(self) -> None:
        super().__init__()
        self._checking = bool(context.CLIARGS.get("check"))
        self._terminal = Terminal(display)
        self._steps = Steps(self._terminal, self._checking)
        self._ledger: Ledger | None = None  # of the run that is watched
        self._for_terminal: Mapping[str, Any] = {}
        self._trouble = False
        self._hosts_failed: set[str] = set()
        self._seen_findings: set[tuple[str, ...]] = set()
        self._last_error = ""
        self._begun = time.monotonic()
        self._over = True  # until a play starts
        atexit.register(self._at_exit)
        # Ctrl-C reaches Ansible's workers, too, until they are detached: end them by the signal, not with Python's traceback.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None)

    def _show_in_step(self, msg: str, color: str | None) -> bool:
        """Show other plugins' output under the current step."""
        if self._terminal.quiet or self._steps.current is None:
            return False
        self._steps.tell(sentence(msg), color)
        return True

    def _warnings(self, result: Any) -> None:
        """Ansible's warnings about a result."""
        # The error's text is complete; -v shows where in the playbooks it was raised.
        result.result.pop("exception", None)
        show = getattr(super(), "_handle_warnings_and_exception", None)
        if show is not None:
            show(result)
            return
        for text in result.result.get("warnings") or []:
            display.warning(str(text))

    def _dumped(self, values: Mapping[str, object]) -> str:
        """Values in the chosen format."""
        dump = getattr(super(), "_dump_results", None)
        return str(dump(values) if dump is not None else json.dumps(values, indent=4, default=str))

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Nothing to show yet."""
        self._terminal.guard(self._show_in_step)
        if self._checking:
            self._terminal.say("Check mode: nothing is changed.", HEADING)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """A play has no line of its own."""
        self._over = False
        extra = getattr(play.get_variable_manager(), "extra_vars", {})
        self._terminal.quiet = boolean(extra.get("ddp_json", False), strict=False)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """The live line shows the task."""
        verb = str(task.args.get("verb")) if task.action == "nanochat.ddp.agent" else ""
        # Imported here once, and not by each of the processes that Ansible forks.
        on_controller(verb)
        self._steps.enter(task)
        if verb == "run_watch":
            self._ledger = ledger_of(task)
            self._steps.forget_task()
            self._terminal.show(self._run_line)
        elif self._steps.current is not None:
            self._steps.start_task(task)

    def _run_line(self, width: int) -> str:
        """The live line of a watched run, below its step, in what is left of a terminal's line."""
        seen = self._ledger.seen() if self._ledger else []
        return "  " + run_line(seen, max(1, width - 2), self._terminal.fancy) if seen else ""

    def v2_runner_on_ok(self, result: Any) -> None:
        """Count changes; show texts and findings."""
        if "terminal" in result.result and result.task.action == "nanochat.ddp.agent":
            self._for_terminal = result.result
        self._steps.worked = True
        self.v2_runner_item_on_ok(result)
        if result.result.get("changed"):
            host = result.host.get_name()
            self._steps.count_change(host)
            if self._checking and not self._terminal.quiet:
                self._steps.tell(f"would change on {host}: {task_name(result.task)}", C.COLOR_CHANGED)

    def _findings(self, seen: Mapping[str, object]) -> None:
        for found in findings_in(seen):
            if self._terminal.quiet:
                return
            key = tuple(str(found.get(part)) for part in ("code", "host", "peer", "seen"))
            if key not in self._seen_findings:
                self._seen_findings.add(key)
                severity = str(found["severity"])
                kind = severity if severity in MARKS else "info"
                self._steps.tell(f"{self._terminal.mark(kind)} {finding_text(found)}", COLORS.get(kind))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """The whole error with its host; ignored ones are not shown."""
        self._warnings(result)
        self._findings(result.result)
        if ignore_errors:
            return
        items = result.result.get("results") if result.task.loop else None
        failed = [item for item in items or [] if isinstance(item, Mapping) and item.get("failed")]
        if not failed:
            self._error(result, result.result)

    def _error(self, result: Any, seen: Mapping[str, object]) -> None:
        self._steps.failed = self._trouble = True
        host, mark = result.host.get_name(), self._terminal.mark("failed")
        text = sentence(seen.get("msg")) or sentence(self._dumped(dict(seen)))
        if not result.task.run_once:
            self._hosts_failed.add(host)
        same, self._last_error = text == self._last_error, text
        self._steps.tell(f"{mark} {host}: the same" if same else error_text(result, seen, text, mark), C.COLOR_ERROR)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """One sentence, and what to do."""
        self._warnings(result)
        if not result.task.ignore_unreachable:
            self._steps.failed = self._trouble = True
            self._hosts_failed.add(result.host.get_name())
            text = unreachable_text(result.host.get_name(), str(result.result.get("msg") or ""))
            self._steps.tell(f"{self._terminal.mark('failed')} {text}", C.COLOR_UNREACHABLE)

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Nothing happened."""
        self._warnings(result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """One item of a loop: its texts and findings."""
        self._warnings(result)
        if result.task.action in DEBUG:
            text = result.result.get("msg")
            if isinstance(text, list) and all(isinstance(line, str) for line in text):
                text = "\n".join(text)
            self._steps.tell(sentence(text if isinstance(text, str) else self._dumped(result.result)))
        self._findings(result.result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """One item of a loop that failed."""
        self._warnings(result)
        self._findings(result.result)
        if not result.task.ignore_errors:
            self._error(result, result.result)

    def v2_on_file_diff(self, result: Any) -> None:
        """Differences, each with its host and task."""
        seen = result.result
        parts = seen.get("results") if result.task.loop and "results" in seen else [seen]
        for part in parts:
            if isinstance(part, Mapping) and part.get("diff") and part.get("changed"):
                differences = getattr(super(), "_get_diff", self._dumped)
                diff = differences(part["diff"])
                if diff:
                    self._steps.tell(f"{result.host.get_name()}: {task_name(result.task)}", C.COLOR_CHANGED)
                    self._terminal.say(sentence(diff), colored=True)

    def v2_playbook_on_no_hosts_matched(self) -> None:
        """A play without hosts would end successfully, and a mistyped host would go unnoticed."""
        self._terminal.say(
            "No host matches: does the inventory (-i) have a group `trainers`?",
            C.COLOR_ERROR,
        )
        self._over = True
        raise SystemExit(1)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The last line: the duration, and failures."""
        self._over = True
        self._steps.leave()
        self._terminal.hide()
        if self._for_terminal:
            # The prompt that the playbook prepared.
            if sys.stdin.isatty() and sys.stdout.isatty():
                hand_over(self._for_terminal["terminal"], bool(self._for_terminal["remote"]))
            else:
                self._terminal.say(f"Run this in a terminal to chat with the model:\n{self._for_terminal['line']}")
            return
        if self._terminal.quiet and not self._trouble:
            return
        if self._steps.shown or self._trouble:
            took = seconds_text(time.monotonic() - self._begun)
            text = closing_text(stats, self._hosts_failed, took, self._checking)
            self._terminal.say(text, stderr=self._terminal.quiet)

    def _at_exit(self) -> None:
        """Restore the terminal after an interruption, and say what that means for the training."""
        # Someone who presses Ctrl-C twice should read it too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not self._terminal.leave() or self._terminal.quiet:
            return
        if self._ledger and any(one.verdict is None for one in self._ledger.seen()):
            self._terminal.say(
                "Training continues in the background; watch it with nanochat.ddp.status, stop it with nanochat.ddp.stop."
            )
        elif not self._over:
            self._terminal.say("Interrupted. What was done stays; to go on, run the same command again.")


# Ansible knows its verbosity before it loads its display.
CallbackModule: type[CallbackBase] = AnsiblesOwn if display.verbosity > 0 else Story
