# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Converts and checks values of settings as written in an inventory or after -e."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any, Callable, Mapping

from .settings_table import Setting
from .urls import NO_CREDENTIALS, has_credentials

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
SECRET = "ddp_secret_env"
# Default limit of rows without one.
MOST_OF_ALL = 2**31


def _as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("not a number")
    if isinstance(value, float) and value != int(value):
        raise ValueError("not whole")
    return int(value.strip().replace("_", "")) if isinstance(value, str) else int(value)


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _as_bool(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("neither true nor false")


def _as_str(value: Any) -> str:
    if isinstance(value, (bool, list, dict)):
        raise ValueError("not a word")
    return str(value).strip()


def _as_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = _list_in(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, (list, tuple)) or any(isinstance(item, (list, dict)) for item in value):
        raise ValueError("not a list of words")
    return tuple(str(item) for item in value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _list_in(text: str) -> Any:
    """Parse a list from -e, in JSON or with single quotes."""
    try:
        return _json(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("not a list") from None


def _as_dict(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, Mapping):
        raise ValueError("not a dictionary")
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{str(name)!r} is not a valid environment variable name")
    return {str(name): _env_value(item) for name, item in value.items()}


def _env_value(item: Any) -> str:
    """The value as the inventory has it: YAML's yes becomes true again."""
    if isinstance(item, (list, dict)):
        raise ValueError("a value is a list or a dictionary; quote it exactly as the process should see it")
    if isinstance(item, bool):
        return "true" if item else "false"
    return "" if item is None else str(item)


CONVERT: dict[str, Callable[[Any], Any]] = {
    "int": _as_int,
    "float": _as_float,
    "bool": _as_bool,
    "str": _as_str,
    "list": _as_list,
    "dict": _as_dict,
}
WANTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "dict": "a dictionary of environment variables",
}


def wanted(setting: Setting) -> str:
    """The accepted values, in words."""
    if setting.choices:
        return " or ".join([", ".join(setting.choices[:-1]), setting.choices[-1]])
    if setting.takes:
        return setting.takes
    if setting.low is not None:
        return f"{WANTED[setting.kind]} of at least {setting.low:g}"
    return WANTED[setting.kind]


def convert(setting: Setting, value: Any) -> Any:
    """The converted value; raises ValueError if invalid."""
    if value is False and "off" in setting.choices:
        # YAML reads a bare off as false.
        return "off"
    result = CONVERT[setting.kind](value)
    if setting.choices and result not in setting.choices:
        raise ValueError("not a choice")
    if setting.pattern and not re.fullmatch(setting.pattern, result):
        raise ValueError("malformed")
    if setting.low is not None and result < setting.low:
        raise ValueError("too small")
    most = setting.most or MOST_OF_ALL
    if setting.kind in ("int", "float") and result > most:
        raise ValueError(f"at most {most}")
    if setting.kind in ("str", "list", "dict") and not _is_text(result):
        raise ValueError("a NUL byte or a lone surrogate, which paths and names cannot contain")
    if setting.kind in ("str", "list", "dict") and setting.name != SECRET and any(map(has_credentials, _texts(result))):
        raise ValueError(NO_CREDENTIALS)
    if setting.name.endswith("_port") and result > 65535:
        raise ValueError("no such port")
    return result


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value.values() if isinstance(value, dict) else value)


def _is_text(value: Any) -> bool:
    """Whether it is valid text; environment values are checked where they are written."""
    texts = [value] if isinstance(value, str) else list(value)
    try:
        for text in texts:
            text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return not any("\0" in text for text in texts)


def is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
