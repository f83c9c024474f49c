"""``python -m deepspec.inference PACKAGE --target T --prompt TEXT``: decode with a trained drafter.

Needs torch, transformers and safetensors, nothing of what training needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.errors import EXIT_FAILURE, EXIT_OK, DeepSpecError, UserError
from deepspec.inference.open_target import DTYPES, choose_device, open_target
from deepspec.log import emit, printable, setup_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.inference.api import Answer, TextModel
    from deepspec.inference.decoder import Generation


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m deepspec.inference", description="Decode with a target and a DeepSpec package."
    )
    p.add_argument("package", nargs="?", help="package folder; not needed with --plain or --prompt-lookup")
    p.add_argument("--target", required=True, help="the target: a local folder, or a hub id")
    p.add_argument("--prompt", required=True, help="what the user says; the chat template is applied; - reads stdin")
    p.add_argument("--system", help="a system message before it")
    p.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    p.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the chat template, in place of the package's own; VALUE is JSON or text",
    )
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--gamma", type=int, help="drafted tokens of a round; the package's own by default")
    p.add_argument("--confidence-threshold", type=float, help="end blocks before slots that are less likely kept")
    p.add_argument("--plain", action="store_true", help="decode without drafting")
    p.add_argument("--prompt-lookup", action="store_true", help="draft by repeating the text so far")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print the answer as it is decoded (default on a terminal, without --json)",
    )
    p.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draft the package's stored prompts anew before the answer, and refuse it where they differ (default)",
    )
    p.add_argument("--dtype", choices=DTYPES, help="precision; fp32 on CPU and the checkpoint's own on CUDA by default")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--threads", type=int, help="CPU threads")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    setup_logging(level="WARNING")
    try:
        _run(arguments)
    except DeepSpecError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped from the keyboard\n")
        return EXIT_FAILURE
    return EXIT_OK


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from deepspec.inference.sampling import SamplerSettings

    _check(arguments)
    settings = SamplerSettings(arguments.temperature, arguments.seed, arguments.top_k, arguments.top_p)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model = _model(arguments)
    asked: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "settings": settings,
        "gamma": arguments.gamma,
        "raw": arguments.raw,
    }
    if _streams(arguments):
        stream = model.stream(_prompt(arguments), **asked)
        for piece in stream:
            emit(printable(piece), end="")
        emit(f"\n\n{_summary(stream.answer.generation)}")
        return
    answer = model.generate(_prompt(arguments), **asked)
    emit(_json(answer) if arguments.json else f"{printable(answer.text)}\n\n{_summary(answer.generation)}")


def _streams(arguments: argparse.Namespace) -> bool:
    if arguments.stream is None:
        return not arguments.json and sys.stdout.isatty()
    return bool(arguments.stream)


def _model(arguments: argparse.Namespace) -> TextModel:
    """Return the target with what the arguments let draft for it."""
    from deepspec.inference.accelerate import accelerate
    from deepspec.inference.api import TextModel, load
    from deepspec.inference.proposers import PlainProposer, PromptLookupProposer

    options = _template_options(arguments)
    target = open_target(arguments.target, choose_device(arguments.device), arguments.dtype)
    if arguments.plain or arguments.prompt_lookup:
        lookup = PromptLookupProposer(target.info.vocab_size, arguments.gamma or 5)
        accelerate(target)
        return TextModel(target, PlainProposer() if arguments.plain else lookup, options)
    return load(
        arguments.package,
        target,
        template_options=options,
        confidence_threshold=arguments.confidence_threshold,
        self_check=arguments.self_check,
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.plain and arguments.prompt_lookup:
        raise UserError("--plain and --prompt-lookup exclude each other: leave one out")
    if arguments.package is None and not (arguments.plain or arguments.prompt_lookup):
        raise UserError("name a package folder, or decode without one by --plain or --prompt-lookup")
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads={arguments.threads} must be 1 or more")
    if arguments.json and arguments.stream:
        raise UserError("--json prints one object at the end: leave out --stream, or --json")
    if arguments.raw and (arguments.system or arguments.template_option):
        raise UserError("--raw uses no chat template: leave out --system and --template-option, or --raw")


def _template_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the package's options with those of the command line on top."""
    from deepspec.inference.package_config import read_config

    options = dict(read_config(Path(arguments.package)).template_options) if arguments.package else {}
    for text in arguments.template_option:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UserError(f"--template-option {text}: must be KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _prompt(arguments: argparse.Namespace) -> str | list[dict[str, str]]:
    """Return what the target is to answer; ``-`` is what comes from standard input."""
    prompt: str = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw or not arguments.system:
        return prompt
    return [{"role": "system", "content": arguments.system}, {"role": "user", "content": prompt}]


def _summary(generation: Generation) -> str:
    tokens, rounds = len(generation.tokens), len(generation.rounds)
    return (
        f"[{tokens} tokens in {rounds} rounds after the prefill, accepted length {generation.accepted_length:.2f}, "
        f"{tokens / generation.seconds:.1f} tokens/s, ended by {generation.finish_reason}]"
    )


def _json(answer: Answer) -> str:
    generation = answer.generation
    facts: dict[str, Any] = {
        "text": answer.text,
        "tokens": generation.tokens,
        "accepted_length": generation.accepted_length if generation.rounds else None,
        "tokens_per_second": len(generation.tokens) / generation.seconds,
        "seconds": generation.seconds,
        "prefill_seconds": generation.prefill_seconds,
        "finish_reason": generation.finish_reason,
        "rounds": [vars(r) for r in generation.rounds],
    }
    return json.dumps(facts)


if __name__ == "__main__":
    sys.exit(main())
