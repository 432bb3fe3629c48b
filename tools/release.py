# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks and builds a release.

    python tools/release.py check 0.2.0     version, changelog, tag and tree belong together
    python tools/release.py build           dist/nanochat-ddp-VERSION.tar.gz, the same bytes on every machine

A release is: bump `version` in galaxy.yml, `antsibull-changelog release`, commit, `git tag vVERSION`, check, build, publish the file.
The build needs ansible-galaxy and works on the commit, not on the working tree.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def version() -> str:
    found = re.search(r"^version: (\S+)$", (ROOT / "galaxy.yml").read_text(encoding="utf-8"), re.M)
    if not found:
        raise SystemExit("galaxy.yml has no line `version: X.Y.Z`.")
    return found[1]


def problems(wanted: str) -> list[str]:
    """Reasons why this commit is not that release."""
    found = []
    if version() != wanted:
        found.append(f"galaxy.yml says version {version()}, not {wanted}; change it there.")
    if f"\n## v{wanted}\n" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md has no section v{wanted}; run `antsibull-changelog release`.")
    left = [path.name for path in sorted((ROOT / "changelogs" / "fragments").glob("*.yml"))]
    if left:
        found.append(f"changelog fragments are left ({', '.join(left)}); run `antsibull-changelog release`.")
    if git("status", "--porcelain"):
        found.append("the working tree has changes; commit them.")
    tag = f"v{wanted}"
    if git("tag", "--list", tag) and git("rev-list", "-n", "1", tag) != git("rev-parse", "HEAD"):
        found.append(f"the tag {tag} is on another commit.")
    return found


def in_order(artifact: Path) -> dict[str, bytes]:
    """The files of a built collection, with the list of them sorted: ansible-galaxy has it in the order of the file system."""
    with tarfile.open(artifact) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]
    listed = json.loads(files["FILES.json"])
    listed["files"].sort(key=lambda one: one["name"])
    files["FILES.json"] = json.dumps(listed, indent=True).encode()
    manifest = json.loads(files["MANIFEST.json"])
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(files["FILES.json"]).hexdigest()
    files["MANIFEST.json"] = json.dumps(manifest, indent=True).encode()
    return files


def pack(files: dict[str, bytes], executable: set[str], seconds: int) -> bytes:
    """A tar.gz without anything of the machine that made it."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=seconds) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):  # type: ignore[arg-type]
        folders = sorted({str(parent) for name in files for parent in Path(name).parents if str(parent) != "."})
        for name in folders:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, seconds
            archive.addfile(folder)
        # galaxy reads the two lists first.
        for name in sorted(files, key=lambda one: (one not in ("MANIFEST.json", "FILES.json"), one)):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(files[name]), 0o755 if name in executable else 0o644, seconds
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


def build() -> Path:
    seconds = int(git("log", "-1", "--format=%ct"))
    executable = {line.split("\t")[1] for line in git("ls-files", "-s").splitlines() if line.startswith("100755")}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as content:
            content.extractall(tree, filter="data")
        argv = ["ansible-galaxy", "collection", "build", "--output-path", folder, str(tree)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        artifact = next(Path(folder).glob("*.tar.gz"))
        packed = pack(in_order(artifact), executable, seconds)
    target = ROOT / "dist" / artifact.name
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(packed)
    return target


def main(words: list[str]) -> int:
    if words == ["build"]:
        target = build()
        print(f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {target.relative_to(ROOT)}")
        return 0
    if len(words) == 2 and words[0] == "check":
        found = problems(words[1])
        print("\n".join(found) or f"This commit is ready to be released as {words[1]}.")
        return 1 if found else 0
    print((__doc__ or "").strip(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
