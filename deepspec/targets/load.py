"""From ``conf/target`` to a frozen target; every way in which that can fail has one message."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from deepspec.errors import TargetError
from deepspec.log import get_logger
from deepspec.targets.layers import auto_layer_ids, validate_layer_ids
from deepspec.targets.target import Target, eos_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepspec.config.schema import TargetConfig

log = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFFLINE = (
    "the model hub cannot be reached, or the model is not there. Set target.path to a local folder, check the "
    "spelling of the hub id, or fetch it on a machine with network access (hf download {path}) and copy the folder"
)

FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of a hub repository that a target is made of; nothing pickled is among them."""
NOT_FETCHED = ("*/*.safetensors", "consolidated*.safetensors")  # the same weights in other layouts


def load_target(config: TargetConfig, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Load the frozen target that ``config`` names.

    Args:
        config: group ``target``.
        device: where the weights go.
        dtype: precision of the weights; None follows ``config.dtype``.

    Raises:
        TargetError: no such folder, hub out of reach, not a decoder-only causal LM, mask token beyond the vocabulary.
        ConfigError: the target has no such layers.
    """
    path = _local_path(config)
    hf_config = _read_config(config, path)
    model = _read_model(config, path, dtype or _dtype(config, torch.device(device)))
    target = Target(model.to(device), _read_tokenizer(config, path), name=config.name)
    if not 0 <= config.mask_token_id < target.info.vocab_size:
        raise TargetError(
            f"target.mask_token_id={config.mask_token_id} must be an id below the vocabulary of {config.path}, "
            f"{target.info.vocab_size}"
        )
    layer_ids(config, target.info.num_layers)
    log.info("target %s: %s, %d layers, %s", config.name, hf_config.model_type, target.info.num_layers, device)
    return target


def load_tokenizer(config: TargetConfig) -> tuple[Any, tuple[int, ...]]:
    """Return the target's tokenizer and the ids that end its answers, without loading its weights.

    Raises:
        TargetError: no such folder, hub out of reach, or no tokenizer.
    """
    from transformers import GenerationConfig

    path = _local_path(config)
    hf_config = _read_config(config, path)
    try:
        generation = GenerationConfig.from_pretrained(path, revision=_revision(config))
    except (OSError, ValueError):  # many models come without one
        generation = None
    return _read_tokenizer(config, path), eos_ids(generation, hf_config.get_text_config(decoder=True))


def fetch_target(config: TargetConfig) -> Path:
    """Put the whole target on this machine, weights too, without loading it; return its folder.

    Raises:
        TargetError: no such folder, hub out of reach, or a repository without safetensors.
    """
    path = _local_path(config)
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    files = [*FETCHED, "*.py"] if config.trust_remote_code else [*FETCHED]
    try:
        folder = Path(
            snapshot_download(path, revision=_revision(config), allow_patterns=files, ignore_patterns=[*NOT_FETCHED])
        )
    except Exception as error:  # the hub's errors have no base of their own
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise TargetError(f"target.path={config.path}: {OFFLINE.format(path=path)} ({_first_line(error)})") from error
    if missing := _missing_weights(folder):
        raise TargetError(
            f"target.path={config.path}: {missing[0]} is not there: the repository has none, or this machine is "
            f"offline and holds a part of the target only; fetch it with network access (hf download {path})"
        )
    return folder


def _missing_weights(folder: Path) -> list[str]:
    """Return the files of weights that a model folder lacks."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [name for name in names if not (folder / name).is_file()]


def layer_ids(config: TargetConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers that feed the drafter, ``auto`` filled in."""
    ids = config.target_layer_ids
    return validate_layer_ids(auto_layer_ids(num_layers) if ids == "auto" else ids, num_layers)


def _local_path(config: TargetConfig) -> str:
    """Return the folder or hub id to load, converting a GGUF package first where the folder is missing."""
    path = Path(config.path).expanduser()
    if config.gguf_package is not None:
        from deepspec.targets.convert import convert_package

        return str(convert_package(config.gguf_package, path))
    looks_local = path.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") != 1
    if path.is_dir() or not looks_local:
        return str(path) if path.is_dir() else config.path
    raise TargetError(f"target.path={config.path}: no such folder")


def _read_config(config: TargetConfig, path: str) -> Any:
    from transformers import AutoConfig

    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise TargetError(f"target.path={config.path}: the folder holds no config.json, so it is not a model folder")
    try:
        found = AutoConfig.from_pretrained(path, revision=_revision(config), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise TargetError(_why(config, path, error)) from error
    if getattr(found, "is_encoder_decoder", False):
        raise TargetError(f"target.path={config.path}: {found.model_type} is an encoder-decoder, not a causal LM")
    return found


def _read_model(config: TargetConfig, path: str, dtype: torch.dtype | str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=_revision(config),
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (OSError, ValueError) as error:
        raise TargetError(_why(config, path, error)) from error
    except SafetensorError as error:
        raise TargetError(
            f"target.path={config.path}: its weights cannot be read ({_first_line(error)}), so a file is damaged or "
            "cut short; fetch the target again"
        ) from error
    finally:
        hf_logging.enable_progress_bar()
    model, found = loaded
    _refuse_gaps(config, found)
    return model


def _refuse_gaps(config: TargetConfig, found: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would fill with random numbers and a warning."""
    gaps = sorted(found["missing_keys"])
    shapes = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in found["mismatched_keys"])
    for names, what in ((gaps, "are missing"), (shapes, "have other shapes than config.json says")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 - enough to see which
            raise TargetError(
                f"target.path={config.path}: of its tensors {', '.join(names[:3])}{more} {what}: the weights do not "
                "belong to this config.json, or a file is missing; fetch the target again"
            )


def _read_tokenizer(config: TargetConfig, path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            path, revision=_revision(config), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise TargetError(f"target.path={config.path}: its tokenizer cannot be loaded: {_first_line(error)}") from error


def _dtype(config: TargetConfig, device: torch.device) -> torch.dtype | str:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else "auto"


def _revision(config: TargetConfig) -> str:
    return config.revision or "main"


def _why(config: TargetConfig, path: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        reason = "the model needs code of its own; set target.trust_remote_code=true if you trust its author"
    elif not Path(path).is_dir() and isinstance(error, OSError):
        reason = OFFLINE.format(path=config.path)
    elif "Unrecognized configuration class" in text or "does not recognize this architecture" in text:
        reason = f"not a causal LM that the installed transformers knows: {_first_line(error)}"
    else:
        reason = _first_line(error)
    return f"target.path={config.path}: {reason}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
