# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person sees of a playbook run: the steps of the story, what was found, and the run itself while it goes on."""

from __future__ import annotations

DOCUMENTATION = r"""
name: story
type: stdout
short_description: Show a training job as a story instead of a list of tasks
version_added: 0.1.0
description:
  - One line for each step of the job with a mark and its duration, findings as they come, one live line while the run goes on, and the
    closing table.
  - Errors are shown whole, with their host. In check mode everything that would change is listed; with C(--diff) the differences are shown.
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
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible import constants as C
from ansible import context
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.callback.default import CallbackModule as DefaultCallback
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import plain_reason, seconds_text
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live import live_line, whole_seconds
from ansible_collections.nanochat.ddp.plugins.module_utils._run.table import counted_text
from ansible_collections.nanochat.ddp.plugins.plugin_utils._growth import MARKED

STORY = ("probe", "plan", "preflight", "network", "trainer", "data", "launch", "watch", "collect", "tracker", "doctor")
# What these say is a whole sentence; the name of their task adds nothing.
SPEAKING = ("fail", "assert", "ansible.builtin.fail", "ansible.builtin.assert")
DEBUG = ("debug", "ansible.builtin.debug", "ansible.legacy.debug")
QUIET_SECONDS = (2.0, 60.0)  # without a terminal lines of progress are this far apart, at first and in a long run
TICK = 1.0  # the live line is drawn anew this often, so that whoever waits sees that time goes by
LONG_TASK = (2.0, 60.0)  # seconds after which a task's time is shown on a terminal, and told without one
COLORS = {"error": C.COLOR_ERROR, "warning": C.COLOR_WARN, "info": C.COLOR_DEBUG}
MARKS = {
    "done": ("✔", "ok"),
    "failed": ("✘", "FAILED"),
    "error": ("✘", "error"),
    "warning": ("!", "warning"),
    "info": ("·", "note"),
}


def step_of(task: Any) -> str | None:
    """The step of the story that a task belongs to: its role, if that is one of ours.

    A role that another one makes use of is a part of that step; a doctor who is called is a step of his own.
    """
    step, role = None, getattr(task, "_role", None)
    while role is not None:
        name = str(role.get_name()).rpartition(".")[2]
        if name == "doctor":
            return name
        step = name if name in STORY else step
        role = next(iter(role.get_parents()), None)
    return step


def task_name(task: Any) -> str:
    """A task's name without its role's."""
    return str(task.get_name()).strip().rpartition(" : ")[2]


def sentence(text: Any) -> str:
    """A message without the empty lines at its ends."""
    return str(text or "").strip("\n").rstrip()


def finding_text(found: Mapping[str, Any]) -> str:
    """A finding in two lines: what was seen where, and what to do."""
    where, seen, remedy = str(found.get("host") or ""), str(found.get("seen")), str(found.get("remedy") or "")
    if found.get("peer"):
        # Who of them tries to reach whom is for the sentence to say.
        where += f", {found['peer']}"
    text = f"{found['code']}  {where}: {seen}" if where else f"{found['code']}  {seen}"
    if not remedy:
        return text
    return f"{text}\n  {remedy}" if found.get("severity") == "info" else f"{text}\n  do: {remedy}"


def findings_in(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings that a result carries."""
    found = result.get("findings")
    if not isinstance(found, list):
        return []
    return [item for item in found if isinstance(item, Mapping) and {"code", "severity", "seen"} <= set(item)]


def unreachable_text(host: str, message: str) -> str:
    """One sentence for a host that cannot be reached."""
    said = sentence(plain_reason(message))
    said = " ".join(line.strip() for line in said.splitlines() if line.strip())
    return f"{host} cannot be reached: {said}\n  do: see that it is on and that `ssh` to it works from here as the inventory says."


class CallbackModule(DefaultCallback):
    """The story; everything that it does not tell is left to Ansible's own display."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "nanochat.ddp.story"

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._live: Callable[[int], str] | None = None
        self._ticking: threading.Thread | None = None
        self._task_begun = 0.0
        self._task_shown = ""
        self._task_told = 0.0
        self._task_grown: dict[str, str] = {}
        self._step: str | None = None
        self._step_begun = 0.0
        self._step_told = False
        self._step_failed = False
        self._step_worked = False
        self._step_changed: dict[str, int] = {}
        self._steps_shown = 0
        self._trouble = False
        self._hosts_failed: set[str] = set()
        self._seen_findings: set[tuple[str, ...]] = set()
        self._last_error = ""
        self._watched: dict[str, dict[str, Any]] = {}
        self._watched_line = ("", 0.0)
        self._host_width = 0
        self._begun = time.monotonic()
        # With -e ddp_json=true the output is for programs: nothing but what the playbook itself prints.
        self._quiet = False
        self._lock = threading.RLock()
        self._original = self._display.display
        atexit.register(self._at_exit)

    # -- writing --------------------------------------------------------------------------------------------------

    @property
    def _own_output(self) -> bool:
        """Whether Ansible's own output was asked for."""
        return bool(self._display.verbosity > 0)

    def _say(self, text: str, color: str | None = None, stderr: bool = False) -> None:
        """Lines that stay."""
        self._print(text, color=color, stderr=stderr)

    def _print(self, *args: Any, **options: Any) -> None:
        """Through Ansible's display, which keeps the log, with the live line out of the way."""
        with self._lock:
            self._clear()
            self._original(*args, **options)
            sys.stdout.flush()
            self._redraw()

    def _guard_display(self) -> None:
        """Let everything that others print (warnings, the text of a plan) keep clear of the live line and fall under its step."""

        def guarded(msg: str, *args: Any, **options: Any) -> None:
            if os.getpid() != self._pid:
                # A worker; what it prints comes to the main process.
                self._original(msg, *args, **options)
            elif options.get("log_only") and (told := MARKED.match(str(msg))):
                self._task_grown[told[1]] = told[2]
            elif args or options.get("stderr") or options.get("log_only") or self._quiet or self._step is None:
                self._print(msg, *args, **options)
            else:
                self._tell(sentence(msg), options.get("color"))

        self._display.display = guarded

    def _write(self, text: str) -> None:
        """Bytes to the terminal past everything that keeps a log.

        Past the locks of sys.stdout too: workers are forked while the ticking thread writes, and would inherit a lock that is held.
        """
        os.write(sys.stdout.fileno(), text.encode(sys.stdout.encoding or "ascii", "replace"))

    def _clear(self) -> None:
        if self._live:
            self._write("\r\x1b[K")

    def _redraw(self) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + self._live(width)[:width])

    def _show_live(self, live: Callable[[int], str]) -> None:
        """The one line that is drawn over and over; on a terminal only. It is made for the width that there is."""
        if self._quiet:
            return
        if self._terminal:
            with self._lock:
                self._live = live
                self._redraw()
        if self._ticking is None:
            self._ticking = threading.Thread(target=self._tick, name="story", daemon=True)
            self._ticking.start()

    def _tick(self) -> None:
        """Draw the line again and again; it costs the hosts nothing."""
        while True:
            time.sleep(TICK)
            with self._lock:
                if self._terminal:
                    self._redraw()
                else:
                    self._plain_task()

    def _task_line(self, width: int) -> str:
        """What is being done, and for how long already."""
        took = time.monotonic() - self._task_begun
        ticking = f"{self._grown()}  {whole_seconds(took)}" if took >= LONG_TASK[0] else ""
        return f"  {self._step or '':<10} {self._task_shown}"[: max(0, width - len(ticking))] + ticking

    def _grown(self) -> str:
        """How much has arrived on each host, as far as it is known."""
        grown = sorted(self._task_grown.items())
        return "".join(f"  {host} {text}" for host, text in grown[:3]) + (" ..." if len(grown) > 3 else "")

    def _plain_task(self) -> None:
        """Without a terminal a task that takes minutes says so once a minute."""
        now = time.monotonic()
        if self._step and self._task_shown and now - max(self._task_begun, self._task_told) >= LONG_TASK[1]:
            self._task_told = now
            self._tell(f"{self._task_shown}: {whole_seconds(now - self._task_begun)} so far{self._grown()}")

    def _mark(self, kind: str) -> str:
        fancy, plain = MARKS[kind]
        return fancy if self._fancy() else plain

    def _fancy(self) -> bool:
        """Whether marks and bars beyond ASCII can be shown."""
        return self._terminal and "utf" in (sys.stdout.encoding or "").lower()

    def _handle_exception(self, result: Any, use_stderr: bool = False) -> None:
        """The error's own text tells it whole; where in the playbooks it arose is told with -v."""
        if self._own_output:
            super()._handle_exception(result, use_stderr)
        else:
            result.pop("exception", None)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _enter(self, task: Any) -> None:
        step = step_of(task)
        if step == self._step or (step is None and self._is_helper(task)):
            return
        self._leave()
        self._step = step
        if step is not None:
            self._step_begun, self._step_told, self._step_failed = time.monotonic(), False, False
            self._step_changed, self._step_worked = {}, False
            self._task_begun, self._task_shown = self._step_begun, ""
            self._show_live(self._task_line)

    def _is_helper(self, task: Any) -> bool:
        """An include or a setting between the tasks of one step does not end it."""
        return task.get_name().startswith(("Gathering", "Validating")) or task.action in C._ACTION_META

    def _leave(self) -> None:
        """The step's own line."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self._live_off()
        if self._quiet or not (self._step_worked or self._step_told):
            return
        took = seconds_text(time.monotonic() - self._step_begun)
        line = f"{self._mark('failed' if self._step_failed else 'done')} {step:<10} {took:>8}{self._changes()}"
        self._say(line, C.COLOR_ERROR if self._step_failed else C.COLOR_OK)
        self._steps_shown += 1

    def _live_off(self) -> None:
        with self._lock:
            self._clear()
            self._live = None

    def _changes(self) -> str:
        if not self._step_changed:
            return ""
        word = "would change" if self._checking() else "changed"
        return f"   {word}: {counted_text(self._step_changed)}"

    def _checking(self) -> bool:
        return bool(context.CLIARGS.get("check"))

    def _tell(self, text: str, color: str | None = None) -> None:
        """Something that belongs to the step, below its name."""
        if self._quiet:
            self._say(text, color, stderr=color == C.COLOR_ERROR)
            return
        if self._step is not None and not self._step_told:
            self._step_told = True
            self._say(f"{'▸ ' if self._fancy() else ''}{self._step}", C.COLOR_HIGHLIGHT)
        indent = "  " if self._step is not None else ""
        self._say("\n".join(indent + line if line else "" for line in text.split("\n")), color)

    # -- what happens ---------------------------------------------------------------------------------------------

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Nothing to tell yet."""
        if self._own_output:
            super().v2_playbook_on_start(playbook)
            return
        self._guard_display()
        if self._terminal:
            # Tables are made in processes that no longer see the terminal.
            os.environ["NANOCHAT_DDP_COLUMNS"] = str(shutil.get_terminal_size().columns)
        if self._checking():
            self._say("Check mode: nothing is changed.", C.COLOR_HIGHLIGHT)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """A play has no line of its own."""
        self._play = play
        extra = play.get_variable_manager().extra_vars
        self._quiet = boolean(extra.get("ddp_json", False), strict=False)
        if self._own_output:
            super().v2_playbook_on_play_start(play)

    def _task_start(self, task: Any, prefix: str | None = None) -> None:
        if self._own_output:
            super()._task_start(task, prefix)
            return
        self._last_task_name = task.get_name().strip()
        self._enter(task)
        if self._step is not None and not self._watched:
            name = task_name(task)
            self._task_grown.clear()
            self._task_begun, self._task_shown = (
                time.monotonic(),
                "" if name.startswith("Validating arguments") else name,
            )
            self._show_live(self._task_line)

    def _print_task_banner(self, task: Any) -> None:
        if self._own_output:
            super()._print_task_banner(task)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Changes are counted; texts, findings and progress are shown."""
        if self._own_output:
            super().v2_runner_on_ok(result)
            return
        self._handle_warnings_and_exception(result)
        seen = result.result
        # Ansible checks the arguments of every role, also of those that the tags leave out.
        self._step_worked = self._step_worked or not task_name(result.task).startswith("Validating arguments")
        if result.task.action in DEBUG:
            self._debug_text(result)
        self._progress(result, final=True)
        self._findings(seen)
        if seen.get("changed"):
            self._changed(result)

    def _debug_text(self, result: Any) -> None:
        text = result.result.get("msg")
        if text is None:
            shown = {
                key: value
                for key, value in result.result.items()
                if not key.startswith("_") and key not in ("changed", "failed")
            }
            self._tell(sentence(self._dump_results(shown)))
        else:
            self._tell(sentence(text) if isinstance(text, str) else sentence(self._dump_results({"msg": text})))

    def _changed(self, result: Any) -> None:
        host = result.host.get_name()
        self._step_changed[host] = self._step_changed.get(host, 0) + 1
        if self._checking() and not self._quiet:
            self._tell(f"would change on {host}: {task_name(result.task)}", C.COLOR_CHANGED)

    def _findings(self, seen: Mapping[str, Any]) -> None:
        for found in findings_in(seen):
            if self._quiet:
                return
            key = tuple(str(found.get(part)) for part in ("code", "host", "peer", "seen"))
            if key not in self._seen_findings:
                self._seen_findings.add(key)
                severity = str(found["severity"])
                kind = severity if severity in MARKS else "info"
                self._tell(f"{self._mark(kind)} {finding_text(found)}", COLORS.get(kind))

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """The whole error, with its host; an ignored one is none."""
        if self._own_output:
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self._handle_warnings_and_exception(result)
        self._findings(result.result)
        if ignore_errors:
            return
        items = result.result.get("results") if result.task.loop else None
        failed = [item for item in items or [] if isinstance(item, Mapping) and item.get("failed")]
        if not failed:
            self._error(result, result.result)

    def _error(self, result: Any, seen: Mapping[str, Any]) -> None:
        self._step_failed = self._trouble = True
        host = result.host.get_name()
        text = sentence(seen.get("msg")) or sentence(self._dump_results(dict(seen)))
        if not result.task.run_once:
            self._hosts_failed.add(host)
        if text == self._last_error:
            self._tell(f"{self._mark('failed')} {host}: the same", C.COLOR_ERROR)
            return
        self._last_error = text
        lines = self._error_lines(result, text)
        for stream in ("stderr", "stdout", "module_stderr"):
            said = sentence(seen.get(stream))
            if said and said not in text:
                lines.append(f"{stream}:\n{said}")
        if text.startswith("Task failed") or "module_stderr" in seen:
            lines.append(f"at {result.task.get_path()}")
        self._tell("\n  ".join("\n".join(lines).split("\n")), C.COLOR_ERROR)

    def _error_lines(self, result: Any, text: str) -> list[str]:
        """Where, at what, and the error itself; what is done once for all hosts is no fault of the one on which it is done."""
        mark, task = self._mark("failed"), task_name(result.task)
        if not result.task.run_once:
            return [f"{mark} {result.host.get_name()}: {task}", text]
        ours = str(result.task.action).startswith("nanochat.ddp.")
        return [f"{mark} {text}"] if ours or result.task.action in SPEAKING else [f"{mark} {task}", text]

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """One sentence, and what to do."""
        if self._own_output:
            super().v2_runner_on_unreachable(result)
            return
        self._handle_warnings_and_exception(result)
        if not result.task.ignore_unreachable:
            self._step_failed = self._trouble = True
            self._hosts_failed.add(result.host.get_name())
            text = unreachable_text(result.host.get_name(), str(result.result.get("msg") or ""))
            self._tell(f"{self._mark('failed')} {text}", C.COLOR_UNREACHABLE)

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Nothing happened, so nothing is told."""
        if self._own_output:
            super().v2_runner_on_skipped(result)
        else:
            self._handle_warnings_and_exception(result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """One item of a loop: its findings, and what it would change."""
        if self._own_output:
            super().v2_runner_item_on_ok(result)
            return
        self._handle_warnings_and_exception(result)
        if result.task.action in DEBUG:
            self._debug_text(result)
        self._findings(result.result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """One item of a loop that failed."""
        if self._own_output:
            super().v2_runner_item_on_failed(result)
            return
        self._handle_warnings_and_exception(result)
        self._findings(result.result)
        if not result.task.ignore_errors:
            self._error(result, result.result)

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        """Nothing happened."""
        if self._own_output:
            super().v2_runner_item_on_skipped(result)

    def v2_playbook_on_include(self, included_file: Any) -> None:
        """Files are no part of the story."""
        if self._own_output:
            super().v2_playbook_on_include(included_file)

    def v2_on_file_diff(self, result: Any) -> None:
        """Differences, each with its host and task."""
        if self._own_output:
            super().v2_on_file_diff(result)
            return
        seen = result.result
        parts = seen.get("results") if result.task.loop and "results" in seen else [seen]
        for part in parts:
            if isinstance(part, Mapping) and part.get("diff") and part.get("changed"):
                diff = self._get_diff(part["diff"])
                if diff:
                    self._tell(f"{result.host.get_name()}: {task_name(result.task)}", C.COLOR_CHANGED)
                    self._say(sentence(diff))

    def v2_runner_retry(self, result: Any) -> None:
        """Progress of a run that is watched, and lines of a log that is followed."""
        if self._own_output:
            super().v2_runner_retry(result)
        else:
            self._progress(result, final=False)

    def v2_playbook_on_no_hosts_matched(self) -> None:
        """Said as it is."""
        self._say(
            "No host of the inventory matches: is there a group `trainers`, and is -i the right inventory?",
            C.COLOR_WARN,
        )

    def v2_playbook_on_no_hosts_remaining(self) -> None:
        """The errors have been told."""
        if self._own_output:
            super().v2_playbook_on_no_hosts_remaining()

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The last line: how long it took, and where it failed."""
        if self._own_output:
            super().v2_playbook_on_stats(stats)
            return
        self._leave()
        self._live_off()
        if self._quiet and not self._trouble:
            return
        if self._steps_shown or self._trouble:
            self._say(self._closing(stats), stderr=self._quiet)

    def _closing(self, stats: Any) -> str:
        sums = {host: stats.summarize(host) for host in sorted(stats.processed)}
        bad = [host for host, total in sums.items() if total["failures"] or total["unreachable"]]
        where = [host for host in bad if host in self._hosts_failed]
        changed = {host: total["changed"] for host, total in sums.items() if total["changed"]}
        word = "would change" if self._checking() else "changed"
        outcome = f"failed on {', '.join(where)}" if where else "failed" if bad else "done"
        parts = [outcome, f"in {seconds_text(time.monotonic() - self._begun)}"]
        return f"{' '.join(parts)}; {word}: {counted_text(changed) or 'nothing'}"

    # -- the run itself -------------------------------------------------------------------------------------------

    def _progress(self, result: Any, final: bool) -> None:
        seen = result.result
        if isinstance(seen.get("lines"), list) and "over" in seen:
            self._log_lines(result.host.get_name(), seen["lines"])
            return
        if "over" not in seen or not isinstance(seen.get("run"), Mapping):
            return
        host = result.host.get_name()
        first = self._watched.get(host, {}).get("first", time.monotonic())
        self._watched[host] = {
            "host": host,
            "first": first,
            "run": seen["run"],
            "verdict": seen.get("verdict"),
            "seen": time.monotonic(),
            "reachable": seen.get("reachable") is not False,
        }
        self._task_shown = ""
        if self._quiet:
            return
        if final and seen.get("verdict"):
            self._live_off()
        else:
            self._show_live(self._run_line)
        if not self._terminal:
            self._plain_progress(self._run_line(0).strip())

    def _log_lines(self, host: str, lines: list[str]) -> None:
        """Lines of a log, each with its host."""
        self._host_width = max(self._host_width, len(host))
        if lines:
            self._say("\n".join(f"{host:<{self._host_width}} | {line}" for line in lines))

    def _run_line(self, width: int) -> str:
        """Where the run is, as far as the line has room for it."""
        now = time.monotonic()
        rows = [{**row, "age": now - row["seen"], "watched": now - row["first"]} for row in self._watched.values()]
        away = [row["host"] for row in rows if not row["reachable"]]
        tail = f"  ({', '.join(sorted(away))} does not answer)" if away else ""
        room = max(20, width - 2 - len(tail)) if width else 0
        return "  " + live_line(rows, room, unicode=self._fancy()) + tail

    def _plain_progress(self, line: str) -> None:
        """Without a terminal a line now and then will do."""
        before, at = self._watched_line
        now = time.monotonic()
        pause = min(QUIET_SECONDS[1], max(QUIET_SECONDS[0], (now - self._step_begun) / 10))
        if line != before and now - at >= pause:
            self._watched_line = (line, now)
            self._tell(line)

    def _at_exit(self) -> None:
        """Leave the terminal in order when somebody interrupts, and say what that means for the training."""
        if os.getpid() != self._pid:
            return
        if self._live:
            self._write("\n")
            self._live = None
        if any(row["verdict"] is None for row in self._watched.values()):
            self._say(
                "The training goes on without this display; the playbook nanochat.ddp.status shows it, nanochat.ddp.stop ends it."
            )
