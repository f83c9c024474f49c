"""Out and in again: every layout comes back bit for bit; folders of other projects; and what cannot be held here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.contracts import TargetInfo
from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.files import load_drafter, read_description, save_drafter
from deepspec.errors import ConfigError, PackageError
from deepspec.export.importers.load import import_drafter, import_run
from deepspec.export.layouts.common import Source
from deepspec.export.layouts.compressed import restore
from deepspec.export.layouts.registry import make_files
from deepspec.export.layouts.write import write_files
from deepspec.export.package import native_package, write_package
from deepspec.nn.head import FrozenHead
from tests.unit.export.layouts.cases import LAYOUT_OF, LLAMA3_ROPE, TAPS, info, source

Config = dict[str, Any]


@dataclass
class Target:
    """What an import needs of a target."""

    info: TargetInfo
    head: FrozenHead


def target_of(given: Source) -> Target:
    return Target(given.target, given.drafter.head)


def written(folder: Path, given: Source, layout: str) -> Path:
    folder.mkdir(exist_ok=True)
    write_files(folder, make_files(layout, given))
    return folder


def rounded(given: Source) -> Source:
    """Make every weight a number that the 16-bit type has, so that a round trip can be compared bit for bit."""
    for parameter in given.drafter.parameters():
        parameter.data = parameter.data.to(given.numbers.dtype).float()
    return given


EVERY: list[tuple[str, str, dict[str, Any]]] = [
    ("dspark", "universal", {}),
    ("dspark", "universal", {"include_embeddings": True, "tied": True}),
    ("dspark", "universal", {"include_embeddings": True, "dtype": torch.float16}),
    ("dspark", "universal", {"markov_head": "gated", "confidence_with_markov": False}),
    ("dspark", "universal", {"markov_head": "rnn", "ce": 0.5}),
    ("dspark", "universal", {"markov_head": "none", "confidence_with_markov": False}),
    ("dspark", "universal", {"markov_head": "none", "confidence_head": False, "confidence_with_markov": False}),
    ("dspark", "universal", {"draft_vocab_size": 40, "sliding_window": 8, "intermediate_size": 24}),
    ("dspark", "speculators", {}),
    ("dspark", "speculators", {"draft_vocab_size": 40, "sliding_window": 8}),
    ("dflash", "universal", {"init": "target"}),
    ("fill_in", "zlab_dflash", {}),
    ("fill_in", "zlab_dflash", {"draft_vocab_size": 40, "sliding_window": 8}),
    ("fill_in", "speculators", {}),
    ("eagle3", "eagle3", {}),
    ("eagle3", "eagle3", {"draft_vocab_size": 40, "include_embeddings": True, "tied": True}),
    ("mtp", "mtp", {}),
]


@pytest.mark.parametrize(("kind", "layout", "over"), EVERY)
def test_every_layout_comes_back_bit_for_bit(tmp_path: Path, kind: str, layout: str, over: dict[str, Any]) -> None:
    """Layers [1, 9, 17], and a rotary base of 1e6 with llama3's scaling: in no layout may either move."""
    target = info(num_layers=20, rope_parameters=LLAMA3_ROPE)
    given = rounded(source(kind, taps=(1, 9, 17), target=target, **over))
    back = import_drafter(written(tmp_path / "x", given, layout), target_of(given))
    assert back.config == given.config
    assert back.drafter.conventions == given.drafter.conventions
    assert back.drafter.taps == (() if kind == "mtp" else (1, 9, 17))
    ours, theirs = given.drafter.state_dict(), back.drafter.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("quantisation", ["w8a8", "w8a16"])
@pytest.mark.parametrize("kind", ["dspark", "fill_in", "eagle3"])
def test_quantised_matrices_come_back_as_they_are_stored(tmp_path: Path, kind: str, quantisation: str) -> None:
    given = source(kind, quantisation=quantisation)
    made = make_files(LAYOUT_OF[kind], given)
    back = import_drafter(written(tmp_path / "x", given, LAYOUT_OF[kind]), target_of(given)).drafter.state_dict()
    stored = [name for name in back if name.startswith("layers.") and back[name].ndim == 2]
    for name in stored:
        theirs = name.replace("layers.0.", "midlayer.") if kind == "eagle3" else name
        assert back[name].equal(restore(made.tensors, theirs))
    assert len(stored) == 7 * (1 if kind == "eagle3" else 2)


def test_an_import_is_a_checkpoint_that_can_be_loaded(tmp_path: Path) -> None:
    given = rounded(source())
    back = import_drafter(written(tmp_path / "x", given, "universal"), target_of(given))
    (tmp_path / "run").mkdir()
    save_drafter(tmp_path / "run", back.drafter, back.config, given.target)
    loaded = load_drafter(tmp_path / "run").state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in given.drafter.state_dict().items())
    assert read_description(tmp_path / "run")["target"]["fingerprint"] == "f00"


def test_a_native_package_comes_in_too(tmp_path: Path) -> None:
    given = rounded(source())
    write_package(tmp_path, *native_package(given.drafter, given.config, given.target, "bf16"))
    back = import_drafter(tmp_path, target_of(given))
    assert (back.project, back.config) == ("native", given.config)
    assert back.drafter.get_parameter("fc.weight").equal(given.drafter.get_parameter("fc.weight"))


def edit(folder: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def as_published(config: Config) -> None:
    """Leave what the published training code writes."""
    for name in (
        "deepspec", "is_causal", "sample_from_anchor", "target_hidden_size", "rope_theta", "rope_scaling",
        "dflash_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "aux_hidden_state_layer_ids",
        "sliding_window_non_causal", "speculators_model_type", "speculators_version", "speculators_config",
        "transformer_layer_config",
    ):  # fmt: skip
        config.pop(name, None)


def as_specforge(config: Config) -> None:
    """Nest the algorithm's keys, and leave them nowhere else."""
    nested = config["dflash_config"]
    as_published(config)
    for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
                 "mask_token_id", "target_layer_ids"):  # fmt: skip
        config.pop(name)
    nested.pop("sample_from_anchor")
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": nested, "rope_theta": 10000.0}


def as_zlab(config: Config) -> None:
    for name in ("deepspec", "is_causal", "mask_token_id", "draft_vocab_size", "target_hidden_size"):
        config.pop(name)


def as_library(config: Config) -> None:
    """Add what the library of speculators writes itself."""
    config.pop("deepspec")
    config |= {"auto_map": {"": "config.DSparkSpeculatorConfig"}, "target_hidden_size": None}


FOREIGN: list[tuple[str, str, str, dict[str, Any], Callable[[Config], object]]] = [
    ("published", "dspark", "universal", {"include_embeddings": True}, as_published),
    ("published", "dspark", "universal", {"include_embeddings": True, "markov_head": "rnn"}, as_published),
    ("specforge", "dspark", "universal", {}, as_specforge),
    ("speculators", "dspark", "speculators", {}, as_library),
    ("speculators", "dspark", "speculators", {"draft_vocab_size": 40}, as_library),
    ("zlab", "fill_in", "zlab_dflash", {}, as_zlab),
    ("eagle3", "eagle3", "eagle3", {"draft_vocab_size": 40}, lambda c: c.pop("deepspec")),
]


@pytest.mark.parametrize(("project", "kind", "layout", "over", "change"), FOREIGN)
def test_folders_of_other_projects(
    tmp_path: Path, project: str, kind: str, layout: str, over: dict[str, Any], change: Callable[[Config], object]
) -> None:
    given = rounded(source(kind, **over))
    edit(written(tmp_path / "x", given, layout), change)
    back = import_drafter(tmp_path / "x", target_of(given))
    assert back.project == project
    assert back.config == given.config
    assert back.drafter.conventions.target_layer_ids == TAPS
    ours, theirs = given.drafter.state_dict(), back.drafter.state_dict()
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items()) and ours.keys() == theirs.keys()


def test_a_published_dflash_is_an_anchor_first_one(tmp_path: Path) -> None:
    given = rounded(source("dflash"))
    folder = written(tmp_path / "x", given, "universal")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "markov" not in n}, folder / "model.safetensors")
    edit(folder, as_published)
    edit(folder, lambda c: c.update(markov_rank=0, enable_confidence_head=False))
    back = import_drafter(folder, target_of(given))
    assert back.config == DFlashConfig(num_layers=2, gamma=4)


def test_a_published_eagle3_has_head_norms_and_our_names(tmp_path: Path) -> None:
    given = rounded(source("eagle3"))
    folder = written(tmp_path / "x", given, "eagle3")
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(folder / "model.safetensors").items()}
    norms = {f"layers.0.self_attn.{part}_norm.weight": torch.ones(8) for part in "qk"}
    save_file({**tensors, **norms}, folder / "model.safetensors")

    def change(config: Config) -> None:
        for name in ("deepspec", "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_speculative_tokens"):
            config.pop(name)
        config |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(TAPS), "ttt_length": 5}

    edit(folder, change)
    back = import_drafter(folder, target_of(given))
    assert (back.project, back.config) == ("published_eagle3", Eagle3Config(qk_norm=True, ttt_length=5))


def test_rope_of_old_transformers_is_read(tmp_path: Path) -> None:
    given = source(target=info(rope_parameters=LLAMA3_ROPE))
    folder = written(tmp_path / "x", given, "universal")
    edit(folder, lambda c: c.pop("rope_parameters"))
    import_drafter(folder, target_of(given))
    edit(folder, lambda c: c["rope_scaling"].update(factor=4.0))
    with pytest.raises(PackageError, match="rope .*'factor': 4.0.*the target has"):
        import_drafter(folder, target_of(given))


def nested(**values: Any) -> Callable[[Config], object]:
    return lambda config: config["dflash_config"].update(values)


def both(**values: Any) -> Callable[[Config], object]:
    """Change keys at top level and in the section that says them again."""
    return lambda config: [config.update(values), config["dflash_config"].update(values)]


CONFIG_FAULTS: list[tuple[str, str, Callable[[Config], object], str]] = [
    ("dspark", "universal", nested(target_layer_ids=[2, 3, 5]), r"dflash_config.target_layer_ids stands .*\[1, 2, 4\]"),
    ("dspark", "universal", lambda c: c.update(target_layer_ids="auto"), "list of whole numbers"),
    ("dspark", "universal", nested(block_size=9), "dflash_config.block_size=9 contradicts block_size=4"),
    ("dspark", "universal", both(block_size=9), "gamma=9, deepspec.drafter says 4"),
    ("dspark", "universal", both(mask_token_id=970), "mask_token_id=970 must be in 0"),
    ("dspark", "universal", both(sample_from_anchor=False), "sample_from_anchor=False contradicts"),
    ("dspark", "universal", both(markov_rank=4), "markov_rank=4, but the tensors show 8"),
    ("dspark", "universal", both(markov_head_type="rnn"), "markov_head_type='rnn'"),
    ("dspark", "universal", both(enable_confidence_head=False), "enable_confidence_head=False, but the tensors"),
    ("dspark", "universal", lambda c: c.pop("num_hidden_layers"), "num_hidden_layers=None must be a whole number"),
    ("dspark", "universal", lambda c: c.update(num_hidden_layers=1), "num_layers=1, deepspec.drafter says 2"),
    ("dspark", "universal", lambda c: c.update(hidden_size=64), "hidden_size=64"),
    ("dspark", "universal", lambda c: c.update(rms_norm_eps=1e-5), "rms_norm_eps=1e-05"),
    ("dspark", "universal", lambda c: c.update(rope_theta=5e5), "rotary base is"),
    ("dspark", "universal", lambda c: [c.pop("rope_theta"), c.pop("rope_parameters")], "rotary base is missing"),
    ("dspark", "universal", lambda c: c.update(architectures=["Gemma4DSparkModel"]), "cannot be imported"),
    ("dspark", "universal", lambda c: c["deepspec"]["drafter"].update(gamma=5), "gamma=4, deepspec.drafter says 5"),
    ("dspark", "universal", lambda c: c["deepspec"]["drafter"].update(_target_="os.system"), "no configuration"),
    ("dspark", "speculators", lambda c: c.pop("sample_from_anchor"), "lacks sample_from_anchor"),
    ("dspark", "speculators", lambda c: c.update(sample_from_anchor=False), "a DSpark here is anchor-first"),
    ("dspark", "speculators", lambda c: c.pop("aux_hidden_state_layer_ids"), "cannot be guessed"),
    ("fill_in", "zlab_dflash", lambda c: c["dflash_config"].update(projector_type="domino"), "projector_type='domino'"),
    ("fill_in", "zlab_dflash", nested(target_layer_ids=[2, 3, 5]), "5 is the last of the target's 6 layers"),
    ("fill_in", "zlab_dflash", nested(target_layer_ids=[3, 2]), "ids must rise strictly"),
    ("fill_in", "zlab_dflash", lambda c: c.update(sample_from_anchor=True), "contradicts"),
    ("eagle3", "eagle3", lambda c: c.update(norm_before_residual=True), "norm_before_residual=True"),
    ("eagle3", "eagle3", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), r"layers \[0, 1, 3\]"),
    ("mtp", "mtp", lambda c: c.update(num_target_layers=None), "num_target_layers=None must be a whole number"),
    ("dspark", "universal", lambda c: c.update(layer_types=3), "layer_types=3 must be a list"),
    ("dspark", "universal", lambda c: c.update(rope_parameters="x"), "rope_parameters='x' must be a section"),
    ("dspark", "universal", lambda c: c.update(rope_scaling=5), "rope_scaling=5 must be a section"),
    ("dspark", "universal", lambda c: c.update(rope_theta="10000"), "rope_theta='10000' must be a number"),
    ("dspark", "universal", lambda c: c.update(rope_theta=[1]), r"rope_theta=\[1\] must be a number"),
    ("dspark", "universal", lambda c: c["rope_parameters"].update(rope_type="yarn"), "cannot be read: .*factor"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layout", "change", "words"), CONFIG_FAULTS)
def test_a_fault_in_the_config_is_named(
    tmp_path: Path, kind: str, layout: str, change: Callable[[Config], object], words: str
) -> None:
    given = source(kind)
    edit(written(tmp_path / "x", given, layout), change)
    with pytest.raises(PackageError, match=words):
        import_drafter(tmp_path / "x", target_of(given))


def test_a_head_of_zeros_is_a_head_where_nobody_says_otherwise(tmp_path: Path) -> None:
    given = source("dflash")
    edit(written(tmp_path / "x", given, "universal"), lambda c: c.pop("deepspec"))
    config = import_drafter(tmp_path / "x", target_of(given)).config
    assert config == DSparkConfig(
        num_layers=2, gamma=4, markov_rank=16, confidence_head=False, confidence_with_markov=False
    )


Tensors = dict[str, torch.Tensor]


def flatten(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].flatten()


def spoil(tensors: Tensors, end: str) -> None:
    """Turn a part of a packed matrix into floats that are no numbers."""
    name = next(name for name in sorted(tensors) if name.endswith(end))
    tensors[name] = tensors[name].float() * float("nan")


COPIES = {"include_embeddings": True}
TENSOR_FAULTS: list[tuple[str, dict[str, Any], Callable[[Tensors], object], str]] = [
    ("dspark", {}, lambda t: t.update({"fc2.weight": t.pop("fc.weight")}), "fc.weight is missing"),
    ("dspark", {}, lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]}), r"\(3 layers are tapped\)"),
    ("dspark", {}, lambda t: t["norm.weight"].fill_(float("nan")), "norm.weight holds values that are not finite"),
    (
        "dspark",
        {"include_embeddings": True},
        lambda t: t["embed_tokens.weight"].mul_(1.1),
        "embed_tokens.weight is not",
    ),
    ("dspark", COPIES, lambda t: t["lm_head.weight"].mul_(1.1), "lm_head.weight is not the"),
    ("dspark", {"draft_vocab_size": 40}, lambda t: t.update(t2d=~t["t2d"]), "t2d contradicts d2t"),
    ("dspark", {"draft_vocab_size": 40}, lambda t: t["d2t"].fill_(90), "d2t: token 97 is not in"),
    ("dflash", {}, lambda t: t["markov_head.markov_w2.weight"].fill_(1.0), "markov_w2.weight is not zero"),
    ("dspark", {"quantisation": "w8a8"}, lambda t: t.pop("layers.0.mlp.up_proj.weight"), "up_proj.weight is not INT8"),
    ("dspark", {"draft_vocab_size": 40}, lambda t: t.update(d2t=t["d2t"][0]), "d2t is torch.int64 .*a row"),
    ("dspark", {"draft_vocab_size": 40}, lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32"),
    *[
        ("dspark", {}, partial(flatten, name=name), f"{name} has shape .* must have rows and columns")
        for name in ("layers.0.mlp.gate_proj.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight")
    ],
    ("dspark", {"quantisation": "w8a16"}, partial(spoil, end="_shape"), "_shape is missing, or is not two whole"),
    ("dspark", {"quantisation": "w8a16"}, partial(spoil, end="_packed"), "_packed is torch.float32 .*INT32"),
]


@pytest.mark.parametrize(("kind", "over", "change", "words"), TENSOR_FAULTS)
def test_a_fault_in_the_tensors_is_named(
    tmp_path: Path, kind: str, over: dict[str, Any], change: Callable[[Tensors], object], words: str
) -> None:
    given = source(kind, **over)
    path = written(tmp_path / "x", given, "universal") / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(PackageError, match=words):
        import_drafter(tmp_path / "x", target_of(given))


def test_a_window_that_does_not_say_how_blocks_see_themselves_is_refused(tmp_path: Path) -> None:
    given = source("fill_in", sliding_window=8)
    folder = written(tmp_path / "x", given, "zlab_dflash")
    edit(folder, lambda c: c.pop("is_causal"))
    with pytest.raises(PackageError, match="is_causal=None with a sliding window"):
        import_drafter(folder, target_of(given))
    edit(folder, lambda c: c.update(is_causal=False, layer_types=["full_attention", "sliding_attention"]))
    with pytest.raises(PackageError, match="all have the same window"):
        import_drafter(folder, target_of(given))


def test_a_trained_mask_embedding_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    given = source("fill_in")
    folder = written(tmp_path / "x", given, "zlab_dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(PackageError, match="mask embedding of its own"):
        import_drafter(folder, target_of(given))
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(PackageError, match="holds neither"):
        import_drafter(folder, target_of(given))


def test_a_target_with_other_rotary_positions_is_refused(tmp_path: Path) -> None:
    given = source(target=info(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    folder = written(tmp_path / "x", given, "universal")
    with pytest.raises(PackageError, match="rope"):
        import_drafter(folder, Target(info(), given.drafter.head))


def test_a_folder_is_not_imported_onto_itself(tmp_path: Path) -> None:
    given = source("dspark")
    folder = written(tmp_path / "x", given, "universal")
    before = sorted(path.name for path in folder.iterdir())
    run: Any = None
    with pytest.raises(ConfigError, match="itself, which would be replaced"):
        import_run(folder, target_of(given), run, tmp_path / "." / "x", run)
    assert sorted(path.name for path in folder.iterdir()) == before
