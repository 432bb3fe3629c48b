# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible.module_utils import urls
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import interpreter, packages, venv
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import HostInterpreter, VenvError
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import VenvSpec

BASE = HostInterpreter("/usr/bin/python3.11", (3, 11, 2), "x86_64", True, True, True, "glibc-2.36")


def wanted_environment(**changes) -> VenvSpec:
    given = VenvSpec("worker", "/base/venv", ("torch==2.13.0", "numpy==2.4.6"), "auto", "/base/wheels", False)
    return given._replace(**changes)


def told(version: str, **more) -> str:
    numbers = [int(part) for part in version.split(".")]
    known = {"executable": f"/usr/bin/python{version}", "machine": "x86_64", "venv": True, "ensurepip": True}
    return json.dumps({"version": numbers, "pip": True, "libc": ["glibc", "2.36"], **known, **more})


def host_with(**versions: str):
    """The run and find of a host with these interpreters; a version of "" is one that does not run."""

    def run(argv):
        version = versions.get(argv[0].rpartition("/")[2].replace(".", "_"), "")
        return (0, told(version), "") if version else (127, "", "pyenv: command not found")

    def find(name):
        return f"/usr/bin/{name}" if name.replace(".", "_") in versions else None

    return run, find


def test_first_suitable_interpreter_is_taken():
    run, find = host_with(python3="3.9.2", python3_12="3.12.3", python3_13="")
    assert interpreter.find_interpreter(run, find, "", "3.10", "worker").minor == "3.12"


@pytest.mark.parametrize(("says", "taken"), [("/usr/bin/python3.12", "/usr/bin/python3.12"), ("", "/shims/python3")])
def test_the_python_behind_a_shim_is_the_one_that_is_taken(says, taken):
    found = interpreter.ask_interpreter(lambda argv: (0, told("3.12.1", executable=says), ""), "/shims/python3")
    assert found is not None and found.path == taken


def test_too_old_python_is_named_with_its_version():
    run, find = host_with(python3="3.9.2")
    with pytest.raises(
        VenvError, match=r"^worker: the trainer needs Python 3.11 or newer, but python3 is 3.9.2\. "
    ) as why:
        interpreter.find_interpreter(run, find, "", "3.11", "worker")
    assert why.value.reason == "python"
    assert "ddp_python" in str(why.value)
    assert "~/uv/bin/uv python install 3.12" in str(why.value)  # a way without root


def test_missing_python_is_said():
    run, find = host_with()
    with pytest.raises(VenvError, match="but no python3 was found"):
        interpreter.find_interpreter(run, find, "", "3.10", "worker")


def test_named_python_is_the_only_one_looked_at():
    run, find = host_with(python3_11="3.11.2")
    with pytest.raises(VenvError, match="/opt/python/bin/python3 does not exist or does not run"):
        interpreter.find_interpreter(run, find, "/opt/python/bin/python3", "3.10", "worker")


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "sudo apt install python3 python3-venv"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "sudo apt install python3 python3-venv"),
        ('ID=rocky\nID_LIKE="rhel centos fedora"\n', "sudo dnf install python3"),
        ("ID=arch\n", "sudo pacman -S python"),
        ("ID=plan9\n", "Install Python 3 with its venv module there"),
    ],
)
def test_remedy_is_the_distribution_s_own_command(tmp_path, release, command):
    (tmp_path / "os-release").write_text(release)
    assert command in interpreter.install_hint("python", release=str(tmp_path / "os-release"))


@pytest.mark.parametrize(
    ("requirement", "version", "met"),
    [
        ("torch==2.13.0", "2.13.0+cpu", True),
        ("torch==2.13.0+cpu", "2.13.0+cpu", True),
        ("torch==2.13.0+cu130", "2.13.0+cpu", False),
        ("torch==2.13.0", "2.12.0", False),
        ("torch==2.13.0", None, False),
        ("mlflow-skinny", "3.1", True),
        ("numpy == 2.4.6 ; python_version >= '3.11'", "2.4.6", True),
    ],
)
def test_installed_version_is_held_against_the_pin(requirement, version, met):
    assert packages.meets(requirement, version) is met


@pytest.mark.parametrize(
    ("has_pip", "says", "fills"),
    [
        (True, "pip 22.3 from", True),
        (True, "pip 22.2.9 from", False),
        (True, "no", False),
        (False, "pip 25.0 from", False),
    ],
)
def test_where_ensurepip_is_missing_a_newer_pip_from_elsewhere_fills_the_environment(tmp_path, has_pip, says, fills):
    made = venv.Venv(
        wanted_environment(wheels=str(tmp_path)), lambda argv: (0, says, ""), BASE._replace(has_pip=has_pip)
    )
    if fills:
        assert made._foreign_pip() == [BASE.path, "-m", "pip", "--python", made.python]
    else:
        with pytest.raises(VenvError, match="lacks ensurepip"):
            made._foreign_pip()
    (tmp_path / "pip-25.0-py3-none-any.whl").touch()
    assert made._foreign_pip()[:2] == [BASE.path, f"{tmp_path}/pip-25.0-py3-none-any.whl/pip"]


@pytest.mark.parametrize(("name", "canonical"), [("Torch==1", "torch"), ("mlflow_skinny>=3", "mlflow-skinny")])
def test_names_are_spelt_as_the_metadata_does(name, canonical):
    assert packages.name_of(name) == canonical


@pytest.mark.parametrize(
    ("said", "reason", "sentence"),
    [
        (
            "WARNING: Retrying ... Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\n"
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "network",
            "no package index answers there",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk",
            "disk is full",
        ),
        ("ERROR: SSLError CERTIFICATE_VERIFY_FAILED", "network", "certificate is not trusted"),
        (
            "ERROR: Ignored the following versions that require a different python version: 2.4.6 Requires-Python >=3.11\n"
            "ERROR: No matching distribution found for numpy==2.4.6",
            "requirement",
            "no package index has numpy==2.4.6 for Python 3.11, which Python 3.11 may be too old for",
        ),
        ("blah\nERROR: something new.\n[notice] a new pip", "other", "pip said: something new"),
    ],
)
def test_pip_s_words_become_one_sentence(said, reason, sentence):
    found = packages.explain(wanted_environment(), BASE, said)

    assert found.reason == reason
    assert str(found).startswith("worker: the packages could not be installed in /base/venv: ")
    assert sentence in str(found)
    assert "\n" not in str(found)


def test_wheels_of_another_python_are_told_as_such():
    found = packages.explain(
        wanted_environment(offline=True), BASE, "ERROR: No matching distribution found for torch==2.13.0"
    )

    assert found.reason == "wheels"
    assert "do not match Python 3.11 on x86_64: torch==2.13.0" in str(found)


class Pip:
    """Scripted answers of pip about torch in the default index, and about its settings."""

    def __init__(self, requires=(), rc=0, settings=""):
        self.requires, self.rc, self.settings, self.asked = requires, rc, settings, []

    def __call__(self, argv):
        self.asked.append(argv)
        if "config" in argv:
            return 0, self.settings, ""
        metadata = {"name": "torch", "version": "2.13.0", "requires_dist": list(self.requires)}
        return self.rc, json.dumps({"install": [{"metadata": metadata}]}), "ERROR: no such option: --report"


NOWHERE = "http://127.0.0.1:1/whl/cpu"


def test_index_that_does_not_answer_is_passed_over_with_a_warning():
    warnings: list = []

    index, argv = packages.choose_index(wanted_environment(torch_index=NOWHERE), Pip(), ["pip"], warnings)

    assert (index, argv) == ("default", [])
    assert warnings == [
        "worker: http://127.0.0.1:1/whl/cpu did not answer within 4 s, so torch comes from the default index"
    ]


@pytest.mark.parametrize("pip", [Pip(["filelock", "nvidia-cublas-cu13==1; platform_system == 'Linux'"]), Pip(rc=2)])
def test_field_37_a_build_for_cuda_is_never_taken_without_a_word(monkeypatch, pip):
    monkeypatch.setattr(packages, "CPU_INDEX", NOWHERE)
    with pytest.raises(VenvError, match="no CPU build of torch is available there") as why:
        packages.choose_index(wanted_environment(), pip, ["pip"], [])
    assert why.value.reason == "network"  # so that another host hands its packages on
    assert "8.0 GB of disk" in str(why.value) and "ddp_torch_index: default" in str(why.value)
    assert all("--dry-run" in argv for argv in pip.asked if "install" in argv)


def test_field_37_a_build_for_cuda_is_not_handed_to_another_python_either(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "CPU_INDEX", NOWHERE)
    pip = Pip(["cuda-toolkit==13.0.3; platform_system == 'Linux'"])
    with pytest.raises(VenvError, match="no CPU build of torch is available there"):
        packages.fetch_wheels(
            wanted_environment(wheels=str(tmp_path / "w")), pip, BASE, ["pip"], {"python": "3.12", "machine": "x86_64"}
        )
    (asked,) = [argv for argv in pip.asked if "install" in argv]
    # It is asked for the Python that gets the wheels, not for the one that fetches them.
    assert asked[asked.index("--python-version") + 1] == "3.12" and "--dry-run" in asked and "--target" in asked
    assert not [argv for argv in pip.asked if "download" in argv]


def test_a_default_index_that_has_a_cpu_build_serves_as_well(monkeypatch):
    monkeypatch.setattr(packages, "CPU_INDEX", NOWHERE)
    assert packages.choose_index(wanted_environment(), Pip(["filelock"]), ["pip"], []) == ("default", [])


def test_index_that_answers_stands_beside_the_default(tmp_path):
    url = tmp_path.as_uri()
    assert packages.choose_index(wanted_environment(torch_index=url), Pip(), ["pip"], []) == (
        url,
        ["--extra-index-url", url],
    )


def test_default_index_asks_nobody_else():
    assert packages.choose_index(wanted_environment(torch_index="default"), Pip(), ["pip"], []) == ("default", [])


def test_the_index_is_asked_through_pip_s_own_proxy(monkeypatch):
    asked = []

    def open_url(page, ca_path=None, **more):
        asked.append((page, ca_path, packages.os.environ.get("https_proxy")))
        raise OSError

    monkeypatch.setattr(urls, "open_url", open_url)
    said = ":env:.proxy='http://env:3128'\nglobal.cert='/etc/hosts'\nglobal.proxy='http://file:3128'\n"
    settings = packages.pip_settings(Pip(settings=said), ["pip"])
    assert not packages.answers("https://index.example/whl/cpu", settings)
    assert asked == [("https://index.example/whl/cpu/torch/", "/etc/hosts", "http://env:3128")]
    assert packages.os.environ.get("https_proxy") != "http://env:3128"


def test_requirements_hold_for_the_python_that_they_name():
    both = ['numpy==2.4.6;python_version>="3.11"', "numpy==2.2.6 ; python_version < '3.11'", "x==1; os_name=='nt'"]
    assert packages.applicable(both, "3.10") == ("numpy==2.2.6", both[2])
    assert packages.applicable(both, "3.14") == ("numpy==2.4.6", both[2])


def test_environment_is_named_by_all_that_goes_into_it():
    one = wanted_environment()
    assert one.digest("3.11") == wanted_environment(requirements=one.requirements[::-1]).digest("3.11")
    others = [wanted_environment(requirements=("torch==2.12.0",)), wanted_environment(torch_index="default")]
    assert len({one.digest("3.11"), one.digest("3.12"), *(other.digest("3.11") for other in others)}) == 4


def test_wheels_for_another_python_and_machine_are_asked_for_by_tag(tmp_path):
    asked = []

    def run(argv):
        asked.append(argv)
        (tmp_path / "wheels.part/torch.whl").write_bytes(b"")
        return 0, "", ""

    target = {"python": "3.12", "machine": "aarch64"}
    wanted = wanted_environment(wheels=str(tmp_path / "wheels"), torch_index="default")
    packages.fetch_wheels(wanted, run, BASE, ["pip"], target)

    line = " ".join(asked[0])
    assert "--only-binary=:all:" in line and "--python-version 3.12" in line and "--abi cp312" in line
    assert "--platform manylinux_2_28_aarch64" in line and "--platform manylinux2014_aarch64" in line
    assert asked[0][-3:] == ["torch==2.13.0", "numpy==2.4.6", "pip"]
    assert packages.wheels_ready(wanted, target)
    assert not packages.wheels_ready(wanted, {**target, "python": "3.11"})


def test_a_mac_fetches_wheels_for_linux(tmp_path):
    asked = []

    def run(argv):
        asked.append(argv)
        (tmp_path / "wheels.part").mkdir(exist_ok=True)
        return 0, "", ""

    wanted = wanted_environment(wheels=str(tmp_path / "wheels"), torch_index="default")
    target = {"python": BASE.minor, "machine": BASE.machine}
    packages.fetch_wheels(wanted, run, BASE._replace(system="Darwin"), ["pip"], target)
    assert "manylinux_2_28_x86_64" in asked[0]
    packages.fetch_wheels(wanted, run, BASE, ["pip"], target)
    assert "--platform" not in asked[1]


def test_no_room_is_said_before_anything_is_fetched(tmp_path):
    with pytest.raises(VenvError, match=rf"^worker: {tmp_path} has .* GB free, but .* need about 10{{9}} TB"):
        packages.check_room(str(tmp_path), 999_999_999_999 * 10**9, "worker")
