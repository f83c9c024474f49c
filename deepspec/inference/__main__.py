"""``python -m deepspec.inference PACKAGE --target T --prompt TEXT``: decode with a trained drafter.

Needs torch, transformers and safetensors, nothing of what training needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.errors import EXIT_FAILURE, EXIT_OK, DeepSpecError, TargetError, UserError
from deepspec.log import emit, printable, setup_logging

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from deepspec.drafters.base import Drafter
    from deepspec.inference.decoder import Generation
    from deepspec.inference.proposers import Proposer
    from deepspec.targets.target import Target

DTYPES = ("fp32", "bf16", "fp16")


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

    from deepspec.inference.accelerate import accelerate
    from deepspec.inference.decoder import SpeculativeDecoder
    from deepspec.inference.sampling import SamplerSettings

    _check(arguments)
    device = _device(arguments.device)
    options = _template_options(arguments)
    settings = SamplerSettings(arguments.temperature, arguments.seed, arguments.top_k, arguments.top_p)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    target = _load_target(arguments, device)
    prompt_ids = _prompt_ids(arguments, target, options)
    proposer, drafter = _proposer(arguments, target)
    accelerate(target, drafter)
    generation = SpeculativeDecoder(target, proposer).generate(
        prompt_ids, arguments.max_new_tokens, settings, _stop_ids(target), arguments.gamma
    )
    text = target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
    emit(_json(text, generation) if arguments.json else f"{printable(text)}\n\n{_summary(generation)}")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.plain and arguments.prompt_lookup:
        raise UserError("--plain and --prompt-lookup exclude each other: leave one out")
    if arguments.package is None and not (arguments.plain or arguments.prompt_lookup):
        raise UserError("name a package folder, or decode without one by --plain or --prompt-lookup")
    if arguments.threads is not None and arguments.threads < 1:
        raise UserError(f"--threads={arguments.threads} must be 1 or more")
    if arguments.raw and (arguments.system or arguments.template_option):
        raise UserError("--raw uses no chat template: leave out --system and --template-option, or --raw")


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: is no device; use auto, cpu or cuda") from error
    found = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= found:
        raise UserError(f"--device {name}: PyTorch finds {found} of that kind on this machine; use another, or auto")
    return device


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


def _load_target(arguments: argparse.Namespace, device: torch.device) -> Target:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    from deepspec.targets.target import Target

    hf_logging.disable_progress_bar()
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = names.get(arguments.dtype or "", torch.float32 if device.type == "cpu" else "auto")
    path = Path(arguments.target).expanduser()
    name = str(path) if path.is_dir() else arguments.target
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise TargetError(f"--target {name}: no such folder")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TargetError(f"--target {arguments.target}: {reason}") from error
    return Target(model.to(device), tokenizer, name=path.name)


def _prompt_ids(arguments: argparse.Namespace, target: Target, options: Mapping[str, Any]) -> list[int]:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw:
        return list(target.tokenizer(prompt)["input_ids"])
    if not getattr(target.tokenizer, "chat_template", None):
        raise TargetError(
            f"--target {arguments.target} has no chat template; use --raw to continue the prompt as it is"
        )
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages.append({"role": "user", "content": prompt})
    try:
        text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template raises whatever it likes
        raise UserError(f"the chat template of --target {arguments.target} refuses the prompt: {error}") from error
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _stop_ids(target: Target) -> set[int]:
    own = target.tokenizer.eos_token_id
    return set(target.info.eos_token_ids) | (set() if own is None else {own})


def _proposer(arguments: argparse.Namespace, target: Target) -> tuple[Proposer, Drafter | None]:
    from deepspec.inference.package import load_package
    from deepspec.inference.proposers import DrafterProposer, PlainProposer, PromptLookupProposer

    if arguments.plain:
        return PlainProposer(), None
    if arguments.prompt_lookup:
        return PromptLookupProposer(target.info.vocab_size, arguments.gamma or 5), None
    drafter = load_package(arguments.package, target)
    return DrafterProposer(drafter, arguments.confidence_threshold), drafter


def _summary(generation: Generation) -> str:
    tokens, rounds = len(generation.tokens), len(generation.rounds)
    return (
        f"[{tokens} tokens in {rounds} rounds after the prefill, accepted length {generation.accepted_length:.2f}, "
        f"{tokens / generation.seconds:.1f} tokens/s, ended by {generation.finish_reason}]"
    )


def _json(text: str, generation: Generation) -> str:
    facts: dict[str, Any] = {
        "text": text,
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
