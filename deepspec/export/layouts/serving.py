"""The commands that serve a folder, made from its config. ``launch/serve_*.sh`` run this file, the card quotes it.

Imports the standard library only, so that it runs where nothing but a server is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

CONFIG = "config.json"
STS, SPS = "dspark_sts.json", "dspark_sps.json"
METHODS = {
    "Qwen3DSparkModel": "dspark",
    "DFlashDraftModel": "dflash",
    "LlamaForCausalLMEagle3": "eagle3",
}
RAGGED = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
USER_MISTAKE = 2


class Served(NamedTuple):
    """What a folder's config says about serving it."""

    method: str  # dspark, dflash or eagle3
    tokens: int  # drafted in a round
    dtype: str
    target: str
    quantised: bool
    speculators: bool  # in the format of that library


class Command(NamedTuple):
    """A command and what it needs in its environment."""

    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """Write it as a shell reads it."""
        return " ".join([*(f"{key}={value}" for key, value in self.environment.items()), shlex.join(self.words)])


def read_served(config: dict[str, Any]) -> Served:
    """Return what ``config.json`` of a server layout says.

    Raises:
        ValueError: it is none.
    """
    speculators = "model_type" not in config and "speculators_config" in config
    names = config.get("architectures") or [""]
    method = str(config.get("speculators_model_type")) if speculators else METHODS.get(names[0], "")
    if method not in METHODS.values():
        raise ValueError(
            f"{CONFIG}: architectures={names} is no layout for a server; export one with export.layout=..."
        )
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    own = (config.get("deepspec") or {}).get("target") or {}
    return Served(
        method=method,
        tokens=_tokens(config, method),
        dtype=str(config.get("dtype", "bfloat16")),
        target=str(verifier.get("name_or_path") or own.get("path") or ""),
        quantised="quantization_config" in config,
        speculators=speculators,
    )


def _tokens(config: dict[str, Any], method: str) -> int:
    if method == "eagle3":
        return int(config.get("num_speculative_tokens", 3))
    size = int(config["block_size"])
    return size if method == "dspark" else size - 1


def vllm(folder: str, served: Served, target: str, extra: list[str], *, adaptive: bool = False) -> Command:
    """Return the command for vLLM. The method is said, because vLLM guesses it from the folder's path."""
    speculative: dict[str, Any] = {
        "method": served.method,
        "model": folder,
        "num_speculative_tokens": served.tokens,
    }
    if served.method == "dspark":
        speculative["draft_sample_method"] = "probabilistic"
    if adaptive:
        speculative["enable_adaptive_verification"] = True
    words = ["vllm", "serve", target, "--dtype", served.dtype, "--speculative-config", json.dumps(speculative)]
    return Command([*words, *extra], {})


def sglang(folder: str, served: Served, target: str, extra: list[str], *, files: frozenset[str]) -> Command:
    """Return the command for SGLang. The type is said, because the draft runs in the one its config names.

    Raises:
        ValueError: the folder is in the format of speculators, which SGLang cannot read.
    """
    if served.speculators:
        raise ValueError(
            "SGLang cannot read the format of speculators: export with export.layout=universal, or zlab_dflash"
        )
    words = ["python3", "-m", "sglang.launch_server", "--model-path", target, "--dtype", served.dtype]
    words += ["--speculative-algorithm", served.method.upper(), "--speculative-draft-model-path", folder]
    environment: dict[str, str] = {}
    if served.method == "dflash":
        words += ["--speculative-num-draft-tokens", str(served.tokens + 1)]
    if served.method == "eagle3":
        words += ["--speculative-num-steps", str(served.tokens), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(served.tokens + 1)]
    if served.method == "dspark" and {STS, SPS} <= files:
        environment = dict(RAGGED)
        words += ["--speculative-dspark-sps-table-path", f"{folder}/{SPS}"]
        words += ["--speculative-dspark-confidence-sts-path", f"{folder}/{STS}"]
    if not served.quantised and any(word.startswith("--quantization") for word in extra):
        words += ["--speculative-draft-model-quantization", "unquant"]  # or the draft inherits the target's
    return Command([*words, *extra], environment)


def command_for(server: str, folder: Path, target: str, extra: list[str], *, adaptive: bool = False) -> Command:
    """Read a folder and return the command that serves it with ``server``, vllm or sglang.

    Raises:
        OSError: there is no ``config.json``.
        ValueError: the folder is no layout for a server, this server cannot read it, or no target is known.
    """
    served = read_served(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    target = target or served.target
    if not target:
        raise ValueError(f"{folder / CONFIG} does not name its target: give it as the second word")
    if server == "vllm":
        return vllm(str(folder), served, target, extra, adaptive=adaptive)
    files = frozenset(path.name for path in folder.iterdir())
    return sglang(str(folder), served, target, extra, files=files)


def main(arguments: list[str]) -> int:
    """Print the command, and become it unless ``--dry-run`` is given."""
    parser = argparse.ArgumentParser(description="Serve a drafter that deepspec.export has written for servers.")
    parser.add_argument("server", choices=("vllm", "sglang"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", nargs="?", default="", help="hub id or folder; the config's own when left out")
    parser.add_argument("--dry-run", action="store_true", help="print the command only")
    parser.add_argument("--adaptive", action="store_true", help="vLLM: verify as much as the confidence is worth")
    own, extra = _halves(arguments)
    given = parser.parse_args(own)
    try:
        command = command_for(given.server, given.folder, given.target, extra, adaptive=given.adaptive)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"error: {given.folder}: {error}\n")
        return USER_MISTAKE
    sys.stdout.write(f"{command}\n")
    sys.stdout.flush()
    if not given.dry_run:
        if shutil.which(command.words[0]) is None:
            sys.stderr.write(f"error: there is no {command.words[0]} here: install {given.server}, or use --dry-run\n")
            return USER_MISTAKE
        os.execvpe(command.words[0], command.words, {**os.environ, **command.environment})  # noqa: S606
    return 0


def _halves(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split at ``--``: what follows belongs to the server."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
