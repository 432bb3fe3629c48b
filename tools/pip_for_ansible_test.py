"""Let ansible-test set up its environments where its own download of pip is out of reach.

ansible-test fetches a get-pip script from a storage bucket before it makes a virtual environment. Where only package
registries are reachable that fails, so a stand-in that installs with the pip bundled in ensurepip is put into its cache.
A script that ansible-test has downloaded by itself is left alone.
"""

from pathlib import Path

# The file names that the maintained releases of ansible-core look for.
NAMES = ("get_pip_24_2.py", "get_pip_25_2.py", "get_pip_25_3.py")

STAND_IN = """\
import pathlib
import runpy
import sys
import sysconfig

import ensurepip

# Where Debian's own Python keeps its wheels, and where others do.
folders = [sysconfig.get_config_var("WHEEL_PKG_DIR") or "/usr/share/python-wheels", pathlib.Path(ensurepip.__file__).parent / "_bundled"]
wheel = next(wheel for folder in folders for wheel in pathlib.Path(folder).glob("pip-*.whl"))
sys.path.insert(0, str(wheel))
sys.argv = ["pip", "install", *[a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel")]]
runpy.run_module("pip", run_name="__main__")
"""


def main() -> None:
    cache = Path.home() / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        path = cache / name
        # One of ours may be from an earlier version.
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith(
            "import pathlib\nimport runpy\n"
        ):
            path.write_text(STAND_IN, encoding="utf-8")


if __name__ == "__main__":
    main()
