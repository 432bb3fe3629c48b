"""Facts about a Debian 12 and a Debian 13 host after they trained together: those of the scenario site, and which system is which."""

from __future__ import annotations

from test_site import *  # noqa: F403  # pylint: disable=wildcard-import,unused-wildcard-import


def test_they_are_what_the_scenario_is_about(host, name):
    release = {"desktop": "12", "laptop": "13"}
    assert (host.system_info.distribution, host.system_info.release.split(".", maxsplit=1)[0]) == (
        "debian",
        release[name],
    )
