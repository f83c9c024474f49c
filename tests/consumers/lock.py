"""Write ``NAME.lock``: every package that a consumer needs, its version, and the hashes of its wheels for Linux x86-64.

    python -m pip install --dry-run --ignore-installed --quiet --report report.json torch==2.13.0 speculators==0.9.0
    python tests/consumers/lock.py report.json > tests/consumers/speculators.lock

PyTorch is left out: which build of it fits is decided by constraints.txt and the index at hand. So are torchvision,
torchaudio and torchcodec, whose CUDA builds break transformers beside a CPU build of PyTorch, and CUDA's own packages.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path

LEFT_OUT = re.compile(r"torch(vision|audio|codec)?|triton|nvidia-.*|cuda-.*")
WHEEL = re.compile(r"(py3\d*|py2\.py3|cp3\d+(\.cp3\d+)*)-(none|abi3|cp31[123])-(any|.*linux.*x86_64.*)\.whl")
INDEX = "https://pypi.org/simple"
LINK = re.compile(r'href="[^"#]*/([^"#/]+)#sha256=([0-9a-f]{64})"')


def locked(name: str, version: str) -> str:
    """Return the lines of one package."""
    with urllib.request.urlopen(f"{INDEX}/{re.sub('[-_.]+', '-', name)}/") as answer:
        links = LINK.findall(answer.read().decode())
    start = re.sub("[-_.]+", "_", f"{name}-{version}-").lower()
    own = {file: digest for file, digest in links if re.sub("[-_.]+", "_", file).lower().startswith(start)}
    hashes = sorted(digest for file, digest in own.items() if WHEEL.search(file))
    if not hashes:
        raise SystemExit(f"{INDEX} has no wheel of {name} {version}")
    return " \\\n".join([f"{name}=={version}", *[f"    --hash=sha256:{digest}" for digest in hashes]])


def main() -> None:
    """Write the lock of a report of pip to standard output."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in report["install"]}
    for name in sorted(found):
        if not LEFT_OUT.fullmatch(name):
            sys.stdout.write(locked(name, found[name]) + "\n")


if __name__ == "__main__":
    main()
