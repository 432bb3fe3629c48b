# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gives uv what it does not read: how pip is configured on this machine (indexes, folders of wheels, certificate, proxy).

Turns its output into one sentence with advice.
"""

from __future__ import annotations

import configparser
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Optional

NAMES = ("index-url", "extra-index-url", "find-links", "no-index", "cert", "proxy", "trusted-host")
NO = ("", "0", "false", "no", "off")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 4
# What uv's output contains, the first that matches; what is missing; and the sentence.
EXPLAINED = (
    ("No space left on device|Disk quota exceeded", "disk", "uv said: {words}"),
    ("Hash mismatch", "", "uv said: {words}"),
    (
        "Failed to install cpython|python-build-standalone",
        "python",
        "the host has no Python of 3.10 or newer, and uv could not install one ({words}). uv downloads it from GitHub: connect the host; "
        "or set python-install-mirror in ~/.config/uv/uv.toml there to a mirror, or to file:///FOLDER; or install a newer Python",
    ),
    (
        "(?i)certificate|failed to fetch|error sending request|failed to download|dns error|timed out",
        "packages",
        "no package index answers there ({words}); connect the host, set an index that it can reach (or its cert) in that user's pip.conf, "
        "or set ddp_trainer_offline so that the controller fetches the packages for it",
    ),
    (
        r"torch==\S*\+cpu",
        "packages",
        f"no CPU build of torch is available there: {CPU_INDEX} did not answer within {ANSWER_SECONDS} s, and that user's package "
        "index has none. Connect the host, set an index that has one in that user's pip.conf, or accept the CUDA build with "
        "`ddp_torch: 2.13.0+cuda`: about 3.0 GB to download and 8.0 GB of disk",
    ),
    ("", "", "uv said: {words}"),
)


def config_files() -> list[str]:
    """pip's files, the strongest last."""
    environ = os.environ
    home = environ.get("HOME") or os.path.expanduser("~")
    own = environ.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    system = [os.path.join(one, "pip", "pip.conf") for one in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    user = [os.path.join(home, ".pip", "pip.conf"), os.path.join(config, "pip", "pip.conf")]
    return [*reversed(system), "/etc/pip.conf", *user, *([own] if own else [])]


def pip_settings() -> dict[str, str]:
    """The settings by pip's names; the environment wins over files."""
    parser = configparser.RawConfigParser(strict=False)
    for path in config_files():
        try:
            parser.read(path, encoding="utf-8")
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
    found: dict[str, str] = {}
    for name in NAMES:
        for section in ("global", "install"):
            if parser.has_option(section, name):
                found[name] = parser.get(section, name)
        variable = "PIP_" + name.upper().replace("-", "_")
        if os.environ.get(variable):
            found[name] = os.environ[variable]
    return {name: value.strip() for name, value in found.items() if value.strip()}


def answers(url: str, settings: Mapping[str, str], seconds: float) -> bool:
    """Whether there is such a page, as pip would ask for it (proxy, certificate)."""
    # Imported here because inspecting an environment needs none of it, and takes less time than loading it.
    import http.client
    import ssl
    import urllib.request

    proxy = settings.get("proxy")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.get("cert"))),
    )
    opener.addheaders = [("User-Agent", "nanochat.ddp")]
    try:
        with opener.open(url, timeout=seconds) as response:
            return bool(response.read())
    except (OSError, ValueError, http.client.HTTPException):
        return False


def for_uv(settings: Mapping[str, str], more: Optional[str] = None) -> dict[str, str]:
    """The same as environment variables of uv; `more` is another index. What the user set for uv stands."""
    own = ("UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_INSECURE_HOST", "UV_INDEX_STRATEGY")
    has_index, proxy = settings.get("no-index", "").lower() in NO, settings.get("proxy", "")
    further = [*settings.get("extra-index-url", "").split(), *([more] if more else [])] if has_index else []
    wanted = {
        # Every package is pinned by its digest, so that it does not matter which index has it.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": settings.get("index-url", "") if has_index else "",
        "UV_INDEX": " ".join(urllib.parse.quote(url, safe=":/?&=@%+~,;$!*'()[]") for url in further),
        "UV_NO_INDEX": "" if has_index else "1",
        "UV_FIND_LINKS": ",".join(settings.get("find-links", "").split()),
        "UV_INSECURE_HOST": settings.get("trusted-host", ""),
        "SSL_CERT_FILE": settings.get("cert", ""),
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
    }
    return {name: value for name, value in wanted.items() if value and (name not in own or not os.environ.get(name))}


class VenvError(Exception):
    """A sentence, and whether packages from elsewhere would help."""

    def __init__(self, text: str, lacks_packages: bool = False) -> None:
        super().__init__(text)
        self.lacks_packages = lacks_packages


def explain(text: str, who: str, folder: str, wheels: str) -> VenvError:
    """Turn uv's output about a folder into a sentence; `wheels`: the packages that it was given, if not those of an index."""
    missing, told = next((missing, told) for pattern, missing, told in EXPLAINED if re.search(pattern, text))
    if wheels and missing not in ("disk", "python"):
        missing, told = "packages", f"the wheels in {wheels} are not those that the lock names ({{words}})"
    words = told.format(words=last_line(text))
    return VenvError(f"{who}: the packages could not be installed in {folder}: {words}", missing == "packages")


def last_line(text: str) -> str:
    """The cause in the words of uv, or of a Python."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("error:", "cause:"))]
    chosen = ": ".join(dict.fromkeys((causes[0], causes[-1]))) if causes else (lines or ["nothing"])[-1]
    return re.sub(r"(error|cause): ", "", chosen)[:400].rstrip(".")
