"""Would a consumer fill every parameter that it builds, with what was meant? Answered from the folder alone.

The consumers do not ask themselves: vLLM and SGLang start without whole matrices. So every parameter that the consumer
builds out of the config is poisoned, filled with the tensors of the folder by the consumer's own names, and what stays
poisoned is reported, as is every tensor that finds no parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.errors import PackageError
from deepspec.export.conformance.consumers import CONSUMERS, Algorithm, Consumer
from deepspec.export.conformance.folder import Finding, Folder, refused
from deepspec.export.conformance.keys import key_findings
from deepspec.export.conformance.parameters import features_of, instances, sizes_of
from deepspec.export.conformance.quantised import FLOATS, expected_kinds, is_quantised, scheme_of
from deepspec.nn.vocabulary import id_problems, target_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from deepspec.drafters.files import TensorKind
    from deepspec.export.conformance.keys import Key
    from deepspec.export.conformance.parameters import Parameter

PREFIXES = ("model.", "_orig_mod.", "draft_model.", "module.")
INTEGERS = ("int64", "int32")
MAX_LAYERS = 1000  # of a config that may be wrong


@dataclass(frozen=True)
class Report:
    """What one consumer makes of a folder."""

    consumer: Consumer
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def conforms(self) -> bool:
        """Whether the consumer fills every parameter with what was meant."""
        return not self.problems


def check(folder: Folder, consumer: str) -> Report:
    """Return what ``consumer``, a key of ``CONSUMERS``, makes of a folder."""
    chosen = CONSUMERS[consumer]
    findings = list(dict.fromkeys(_findings(folder, chosen)))
    return Report(
        chosen,
        tuple(f"{chosen.title}: {finding.text}" for finding in findings if finding.refused),
        tuple(f"{chosen.title}: {finding.text}" for finding in findings if not finding.refused),
    )


def _findings(folder: Folder, consumer: Consumer) -> Iterator[Finding]:
    if folder.is_speculators and consumer.name not in ("speculators", "vllm"):
        yield refused("config.json has no model_type: it cannot read the format of speculators")
        return
    if consumer.name == "speculators" and "speculators_config" not in folder.config:
        yield refused("config.json has no speculators_config: it is not in the library's format")
        return
    algorithm = consumer.algorithms.get(folder.algorithm)
    if algorithm is None:
        named = folder.config.get("speculators_model_type" if folder.is_speculators else "architectures")
        yield refused(f"it has no drafter for {named!r}; it reads {', '.join(consumer.algorithms)}")
        return
    yield from key_findings(folder, _keys(folder, consumer, algorithm))
    for rule in algorithm.rules:
        yield from rule(folder)
    yield from _tensor_findings(folder, consumer, algorithm)


def _keys(folder: Folder, consumer: Consumer, algorithm: Algorithm) -> tuple[Key, ...]:
    """Return the keys that are read; vLLM reads a folder of speculators by that format's."""
    if folder.is_speculators and consumer.name == "vllm":
        return CONSUMERS["speculators"].algorithms[folder.algorithm].keys
    return algorithm.keys


def _tensor_findings(folder: Folder, consumer: Consumer, algorithm: Algorithm) -> Iterator[Finding]:
    poisoned = _built(folder, consumer, algorithm)
    for name, (shape, dtype) in poisoned.items():
        if name not in folder.kinds:
            yield refused(f"nothing fills parameter {name}; {consumer.missing}")
            continue
        found_shape, found_dtype = folder.kinds[name]
        if found_shape != shape:
            yield refused(f"tensor {name} has shape {list(found_shape)}, its parameter {list(shape)}")
        if not _fits(found_dtype, dtype, folder):
            yield refused(f"tensor {name} has type {found_dtype}, its parameter takes {dtype}")
    for name in folder.kinds:
        if name not in poisoned and name not in algorithm.may_hold:
            yield refused(f"tensor {name} fills no parameter; {consumer.unknown}{_hint(name)}")


def _built(folder: Folder, consumer: Consumer, algorithm: Algorithm) -> dict[str, TensorKind]:
    """Return every parameter that the consumer builds, with the kind of tensor that fills it."""
    sizes, features = sizes_of(folder), features_of(folder)
    layers = min(folder.number("num_hidden_layers"), MAX_LAYERS)
    found: dict[str, TensorKind] = {}
    for parameter in algorithm.builds:
        if parameter.when and parameter.when not in features:
            continue
        for name, shape in instances(parameter, sizes, layers).items():
            found |= _kinds(folder, consumer, parameter, name, shape)
    return found


def _kinds(
    folder: Folder, consumer: Consumer, parameter: Parameter, name: str, shape: tuple[int, ...]
) -> dict[str, TensorKind]:
    scheme = scheme_of(folder)
    if scheme is not None and parameter.kind == "linear" and consumer.quantises(name):
        cls = "ParallelLMHead" if "markov" in name else "Linear"
        if is_quantised(consumer.name_of(name.removesuffix(".weight"), folder), scheme, cls):
            return expected_kinds(name, shape, scheme)
    return {name: (shape, {"integer": "integer", "flag": "bool"}.get(parameter.kind, "float"))}


def _fits(found: str, wanted: str, folder: Folder) -> bool:
    """Whether a tensor's type is what its parameter takes; floats are those that the config announces, or fp32."""
    if wanted == "integer":
        return found in INTEGERS
    if wanted == "scale":
        return found in FLOATS
    if wanted == "float":
        announced = folder.get("dtype")
        return found in FLOATS if announced is None else found in (announced, "float32")
    return found == wanted


def _hint(name: str) -> str:
    prefix = next((p for p in PREFIXES if name.startswith(p)), None)
    return f": names have no prefix, remove {prefix!r}" if prefix else ""


def check_values(tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Refuse values that no drafter has: not finite, scales that are not above 0, a draft vocabulary that cannot be.

    Raises:
        PackageError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise PackageError(f"tensor {name} holds values that are not finite")
        if name.endswith("_scale") and not bool((tensor > 0).all()):
            raise PackageError(f"tensor {name} holds scales that are not above 0")
    if "d2t" in tensors:
        problems = id_problems(target_ids(tensors["d2t"].long()), vocab_size)
        if problems:
            raise PackageError("tensor d2t: " + "; ".join(problems))
