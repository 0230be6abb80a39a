"""Builds the wheel and the sdist of what is committed, twice, and keeps them where both times gave the same bytes.

    python tests/packaging/release.py dist

The date in both archives is that of the commit, so whoever checks the commit out and has the same hatchling and Python
gets these very files. Two builds are made in two folders from two copies; nothing that is not committed is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(source: Path, target: Path, epoch: str) -> dict[str, bytes]:
    """The wheel and the sdist of a source folder, by name; `epoch` is the date in them, in seconds since 1970."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(target)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    done = subprocess.run(command, cwd=source, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"hatchling failed:\n{done.stderr}")
    return {file.name: file.read_bytes() for file in sorted(target.iterdir())}


def committed(folder: Path) -> Path:
    """A copy of the commit that is checked out."""
    archive = folder / "source.tar"
    subprocess.run(["git", "archive", "--format=tar", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():  # our own archive; links and odd places would be a fault in the repository
            if not (member.isfile() or member.isdir()) or member.name.startswith(("/", "..")):
                raise SystemExit(f"the repository must hold files alone, got {member.name}")
            tar.extract(member, folder / "source")
    archive.unlink()
    return folder / "source"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the folder to write to, which must hold nothing yet")
    target = parser.parse_args().target.absolute()
    changed = git("status", "--porcelain")
    if changed:
        raise SystemExit(f"a release is what is committed; commit or put away:\n{changed}")
    if target.is_dir() and any(target.iterdir()):
        raise SystemExit(f"{target} must be empty: remove the release in it")
    epoch = git("log", "-1", "--format=%ct")
    made = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            made.append(build(committed(Path(folder)), Path(folder) / "dist", epoch))
    if made[0] != made[1]:
        raise SystemExit(
            f"two builds of one commit differ: {', '.join(n for n in made[0] if made[0][n] != made[1].get(n))}"
        )
    target.mkdir(parents=True, exist_ok=True)
    for name, content in made[0].items():
        (target / name).write_bytes(content)
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in made[0].items())
    (target / "SHA256SUMS").write_text(sums, encoding="utf-8")
    print(sums, end="")


if __name__ == "__main__":
    main()
