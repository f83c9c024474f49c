"""Open a target for decoding with nothing but transformers: a folder or a hub id, its tokenizer, its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.errors import TargetError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from deepspec.targets.target import Target

DTYPES = ("fp32", "bf16", "fp16")


def choose_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` is CUDA where there is one.

    Raises:
        UserError: this machine has no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name}: is no device; use auto, cpu or cuda") from error
    found = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= found:
        raise UserError(f"device {name}: PyTorch finds {found} of that kind on this machine; use another, or auto")
    return device


def open_target(target: str | Path, device: torch.device, dtype: str | None = None) -> Target:
    """Load a target.

    Args:
        target: A local folder, or a hub id.
        device: Where its weights go.
        dtype: fp32, bf16 or fp16; None is fp32 on the CPU and the checkpoint's own elsewhere.

    Raises:
        TargetError: it cannot be loaded, or cannot be used as a target.
        UserError: ``dtype`` is another.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    from deepspec.targets.target import Target

    hf_logging.disable_progress_bar()
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype}: must be {', '.join(DTYPES)}, or left out")
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    chosen = names.get(dtype or "", torch.float32 if device.type == "cpu" else "auto")
    path = Path(target).expanduser()
    name = str(path) if path.is_dir() else str(target)
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise TargetError(f"target {name}: no such folder")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=chosen)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TargetError(f"target {target}: {reason}") from error
    return Target(model.to(device), tokenizer, name=path.name)


def stop_ids(target: Target) -> set[int]:
    """Return the tokens that end a text."""
    own = target.tokenizer.eos_token_id
    return set(target.info.eos_token_ids) | (set() if own is None else {own})


def chat_ids(target: Target, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a conversation that the target is to go on with, in its own chat template.

    Args:
        target: With its tokenizer.
        messages: role and content of each.
        options: Further variables of the template.

    Raises:
        TargetError: there is no template.
        UserError: the template refuses the messages or the options.
    """
    if not getattr(target.tokenizer, "chat_template", None):
        raise TargetError(
            f"target {target.info.name} has no chat template; use --raw (raw=True) to continue the prompt as it is"
        )
    try:
        text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template raises whatever it likes
        raise UserError(f"the chat template of target {target.info.name} refuses the prompt: {error}") from error
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
