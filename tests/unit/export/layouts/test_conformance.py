"""What the tables say about own folders, and about every variant whose fate in the real loaders is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspec.errors import PackageError
from deepspec.export.conformance.check import check, check_values
from deepspec.export.conformance.folder import Folder
from deepspec.export.layouts.common import LayoutFiles
from tests.unit.export.layouts.cases import LLAMA3_ROPE, files, folder, info

OK, NO = True, False
Change = Callable[[dict[str, Any], dict[str, Any]], object]
MARKOV = "markov_head.markov_w1.weight"


def published(**over: Any) -> Folder:
    """Return what the published training code writes: no key that only servers ask for."""
    made = folder(files(include_embeddings=True, **over))
    config = {k: v for k, v in made.config.items() if k not in SERVER_ONLY}
    return Folder(config, made.kinds)


SERVER_ONLY = {
    "is_causal", "sample_from_anchor", "target_hidden_size", "rope_theta", "rope_scaling", "dflash_config", "deepspec",
    "eagle_aux_hidden_state_layer_ids", "speculators_model_type", "speculators_version", "draft_vocab_size",
    "aux_hidden_state_layer_ids", "sliding_window_non_causal", "speculators_config", "transformer_layer_config",
}  # fmt: skip
NESTED = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id",
          "target_layer_ids", "sample_from_anchor")  # fmt: skip


def changed(made: Folder, change: Change) -> Folder:
    """Return a copy that ``change`` (config, kinds) has been at."""
    config, kinds = json.loads(json.dumps(made.config)), dict(made.kinds)
    change(config, kinds)
    return Folder(config, kinds, made.target, made.served_dtype, made.files)


def drop(*names: str) -> Change:
    return lambda config, kinds: [kinds.pop(name) for name in names]


def prefixed(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name in list(kinds):
        kinds[f"model.{name}"] = kinds.pop(name)


def nested_only(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name in NESTED:
        config.pop(name, None)
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        config.pop(name, None)


def no_markov(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    config["markov_rank"] = 0
    config["confidence_head_with_markov"] = config["enable_confidence_head"] = False
    for name in [n for n in kinds if n.startswith(("markov", "confidence"))]:
        del kinds[name]


def embedding_tap(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    config["target_layer_ids"] = [-1, 2, 4]


def plain_ignore(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"] = ["lm_head", "fc", "re:.*markov_head.*", "re:.*confidence_head.*"]


def fc_quantised(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].remove("re:.*fc$")
    shape, _ = kinds["fc.weight"]
    kinds["fc.weight"], kinds["fc.weight_scale"] = (shape, "int8"), ((shape[0], 1), "float32")


def by_name(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Quantise fc and markov_w2 too, each by name."""
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = [r"re:.*layers\..*", "re:.*fc$", "re:.*markov_w2$"]
    config["quantization_config"]["ignore"] = ["lm_head"]
    for name in ("fc", "markov_head.markov_w2"):
        (rows, columns), _ = kinds.pop(f"{name}.weight")
        kinds[f"{name}.weight_packed"] = ((rows, -(-columns // 4)), "int32")
        kinds[f"{name}.weight_scale"] = ((rows, 1), "bfloat16")
        kinds[f"{name}.weight_shape"] = ((2,), "int64")


def fp8(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    scheme = config["quantization_config"]
    scheme["format"] = "float-quantized"
    for part in ("weights", "input_activations"):
        scheme["config_groups"]["group_0"][part]["type"] = "float"
    for name, (shape, dtype) in list(kinds.items()):
        if dtype == "int8":
            kinds[name] = (shape, "F8_E4M3")


def int32_offsets(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    kinds["d2t"] = (kinds["d2t"][0], "int32")


def same(config: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Change nothing."""


def native_bf16() -> Folder:
    return published()


def universal_full() -> Folder:
    return folder(files(include_embeddings=True))


def universal(**over: Any) -> Callable[[], Folder]:
    return lambda: folder(files(**over))


def as_speculators(**over: Any) -> Callable[[], Folder]:
    return lambda: folder(files(layout="speculators", **over))


MATRIX: list[tuple[str, Callable[[], Folder], Change, bool, bool]] = [
    ("published native, bf16", native_bf16, same, OK, OK),
    ("published native, fp16 file", lambda: published(dtype=torch.float16), same, OK, OK),
    ("no embedding and head", native_bf16, drop("embed_tokens.weight", "lm_head.weight"), OK, OK),
    ("fc and one down_proj missing", native_bf16, drop("fc.weight", "layers.1.mlp.down_proj.weight"), NO, NO),
    ("confidence weights missing though enabled", native_bf16,
     drop("confidence_head.proj.weight", "confidence_head.proj.bias"), NO, NO),
    ("names with model. in front", native_bf16, prefixed, NO, NO),
    ("gated Markov", lambda: published(markov_head="gated"), same, NO, OK),
    ("recurrent Markov", lambda: published(markov_head="rnn"), same, NO, OK),
    ("markov_rank 0", native_bf16, no_markov, OK, NO),
    ("the embedding tapped", native_bf16, embedding_tap, OK, NO),
    ("SpecForge, nested keys only", universal_full, nested_only, NO, NO),
    ("SpecForge, flattened too", universal_full, same, OK, OK),
    ("z-lab DFlash", lambda: folder(files("fill_in")), same, OK, OK),
    ("reduced vocabulary, d2t int64", universal(draft_vocab_size=40), same, OK, NO),
    ("reduced vocabulary, d2t int32", universal(draft_vocab_size=40), int32_offsets, OK, NO),
    ("reduced vocabulary without head", universal(draft_vocab_size=40), drop("lm_head.weight"), NO, NO),
    ("speculators", as_speculators(), same, OK, NO),
    ("speculators, reduced", as_speculators(draft_vocab_size=40), same, OK, NO),
    ("speculators, W8A8", as_speculators(quantisation="w8a8"), same, OK, NO),
    ("universal slim", universal(), same, OK, OK),
    ("universal full", universal_full, same, OK, OK),
    ("W8A8", universal(quantisation="w8a8"), same, OK, OK),
    ("W8A16", universal(quantisation="w8a16"), same, OK, OK),
    ("FP8", universal(quantisation="w8a8"), fp8, OK, OK),
    ("W8A8, plain names ignored", universal(quantisation="w8a8"), plain_ignore, NO, OK),
    ("W8A8, fc quantised", universal(quantisation="w8a8"), fc_quantised, OK, NO),
    ("W8A16, fc and markov_w2 by name", universal(quantisation="w8a16"), by_name, OK, NO),
    ("Eagle3, Llama-shaped", lambda: folder(files("eagle3")), same, OK, OK),
    ("Eagle3, reduced", lambda: folder(files("eagle3", draft_vocab_size=40)), same, OK, OK),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "change", "vllm", "sglang"), MATRIX, ids=[row[0] for row in MATRIX])
def test_load_matrix(name: str, make: Callable[[], Folder], change: Change, vllm: bool, sglang: bool) -> None:
    """OK where the real loader fills everything with what was meant; NO where it stops or does not notice."""
    variant = changed(make(), change)
    for consumer, expected in (("vllm", vllm), ("sglang", sglang)):
        report = check(variant, consumer)
        assert report.conforms == expected, report.problems


@pytest.mark.parametrize(
    ("made", "consumers"),
    [
        (files(), ("vllm", "sglang", "speculators")),
        (files(include_embeddings=True, tied=True), ("vllm", "sglang", "speculators", "published_eval")),
        (files("dflash"), ("vllm", "speculators")),  # SGLang warns: no confidence head
        (files(sliding_window=8), ("vllm", "sglang", "speculators")),
        (files(confidence_with_markov=False), ("vllm", "sglang", "speculators")),
        (files(dtype=torch.float16, target=info(rope_parameters=LLAMA3_ROPE)), ("vllm", "sglang", "speculators")),
        (files(quantisation="w8a8"), ("vllm", "sglang")),  # nobody has tried speculators with it
        (files("fill_in", quantisation="w8a16"), ("vllm", "sglang")),
        (files("fill_in", draft_vocab_size=40), ("vllm",)),
        (files(layout="speculators"), ("speculators", "vllm")),
        (files("fill_in", layout="speculators"), ("speculators", "vllm")),
        (files("eagle3", quantisation="w8a8"), ("vllm", "sglang")),
    ],
)
def test_own_folders_conform_without_a_warning(made: LayoutFiles, consumers: tuple[str, ...]) -> None:
    for consumer in consumers:
        report = check(folder(made, served_dtype=made.config["dtype"]), consumer)
        assert (report.problems, report.warnings) == ((), ())


MUTATIONS: list[tuple[str, str, Change, str]] = [
    ("vllm", "dspark", lambda c, k: c.update(target_layer_ids=[2, 3, 5]), "target_layer_ids stands for layers"),
    ("vllm", "dspark", lambda c, k: c.update(target_layer_ids=[2, 3, 5]), r"\[2, 3, 5\].*\[1, 2, 4\]"),
    ("sglang", "dspark", lambda c, k: c["dflash_config"].update(target_layer_ids=[1, 2]), "must|stands for"),
    ("vllm", "dspark", lambda c, k: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 3]), "rise strictly"),
    ("vllm", "dspark", lambda c, k: c.update(eagle_aux_hidden_state_layer_ids=[2, 3, 6]), "the last one"),
    ("vllm", "dspark", lambda c, k: c.update(eagle_aux_hidden_state_layer_ids="auto"), "list of whole numbers"),
    ("vllm", "dspark", lambda c, k: k.update({"fc.weight": ((32, 64), "bfloat16")}), r"fc\.weight has shape \[32"),
    ("vllm", "dspark", lambda c, k: c.update(mask_token_id=97), r"mask_token_id=97 must be in 0 \.\. 96"),
    ("sglang", "dspark", lambda c, k: c["dflash_config"].update(mask_token_id=3), "contradicts dflash_config"),
    ("sglang", "dspark", lambda c, k: c["dflash_config"].update(block_size=9), "dflash_config.block_size=9 contra"),
    ("vllm", "dspark", lambda c, k: c.update(sample_from_anchor=False), "sample_from_anchor=False must be True"),
    ("vllm", "dspark", lambda c, k: c.update(is_causal=True), "is_causal=True must be False"),
    ("vllm", "dspark", lambda c, k: c.update(markov_rank=None), "lacks markov_rank"),
    ("vllm", "dspark", lambda c, k: c.update(markov_rank="8"), "markov_rank='8' must be a whole number"),
    ("vllm", "dspark", lambda c, k: c.update(head_dim=True), "head_dim=True must be a whole number"),
    ("sglang", "dspark", lambda c, k: c.update(dtype="float32"), "dtype='float32' must be 'bfloat16' or 'float16'"),
    ("vllm", "dspark", lambda c, k: c.update(auto_map={"AutoModel": "x.Y"}), "auto_map"),
    ("vllm", "dspark", lambda c, k: c.update(rope_theta=5e5), "rope_theta=500000.0 contradicts"),
    ("vllm", "dspark", lambda c, k: c["rope_parameters"].pop("rope_theta"), "rope_theta is missing"),
    ("vllm", "dspark", lambda c, k: c.update(architectures=["Qwen3Model"]), r"no drafter for \['Qwen3Model'\]"),
    ("vllm", "dspark", lambda c, k: c.update(layer_types=["sliding_attention"] * 2), "sliding_window=None"),
    ("vllm", "dspark", lambda c, k: c.update(layer_types=["full_attention"]), "1 entries"),
    ("vllm", "dspark", lambda c, k: k.update({MARKOV: ((97, 8), "float16")}), "type float16, its parameter takes"),
    ("vllm", "dspark", lambda c, k: k.update({"_orig_mod.fc.weight": ((1,), "bfloat16")}), "remove '_orig_mod.'"),
    ("speculators", "dspark", lambda c, k: c["transformer_layer_config"].update(head_dim=4), "contradicts head_dim=8"),
    ("speculators", "dspark", lambda c, k: c.pop("speculators_config"), "no speculators_config"),
    ("speculators", "dspark", lambda c, k: c.update(block_size=5), "speculative_tokens=4 must be 5"),
    ("published_eval", "dspark", same, "nothing fills parameter embed_tokens.weight"),
    ("vllm", "eagle3", lambda c, k: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 5]), "counts as"),
    ("sglang", "eagle3", lambda c, k: c.pop("eagle_config"), "names no tapped layers"),
    ("sglang", "eagle3", lambda c, k: c.update(draft_vocab_size=None), "lacks draft_vocab_size"),
    ("vllm", "eagle3", lambda c, k: c.update(num_aux_hidden_states=5), "num_aux_hidden_states=5"),
    ("vllm", "fill_in", lambda c, k: c["dflash_config"].update(causal=True), "causal=True must be False"),
    ("sglang", "fill_in", lambda c, k: c.pop("dflash_config"), "lacks dflash_config"),
]  # fmt: skip


@pytest.mark.parametrize(("consumer", "kind", "change", "words"), MUTATIONS)
def test_a_planted_fault_is_named(consumer: str, kind: str, change: Change, words: str) -> None:
    report = check(changed(folder(files(kind), target=info()), change), consumer)
    text = "\n".join(report.problems)
    assert not report.conforms
    with pytest.raises(PackageError, match=words):
        raise PackageError(text)
    assert all(problem.startswith(f"{report.consumer.title}: ") for problem in report.problems)


SCHEMES: list[tuple[str, Change, str]] = [
    ("w8a8", lambda c, k: c["quantization_config"].update(format="pack-quantized"), "input_activations"),
    ("w8a16", lambda c, k: c["quantization_config"].update(format="int-quantized"), "unless it is packed"),
    ("w8a8", lambda c, k: c["quantization_config"].update(quant_method="gptq"), "only compressed-tensors"),
    ("w8a8", lambda c, k: c["quantization_config"].update(format="x"), "format='x'"),
    ("w8a8", lambda c, k: c["quantization_config"]["ignore"].append("re:.*k_proj$"), "are fused"),
    ("w8a8", lambda c, k: k.pop("layers.0.self_attn.q_proj.weight_scale"), "nothing fills .*q_proj.weight_scale"),
    ("none", lambda c, k: k.update({"layers.0.mlp.up_proj.weight": ((48, 32), "int8")}), "type int8"),
]


@pytest.mark.parametrize(("scheme", "change", "words"), SCHEMES)
def test_a_scheme_that_a_server_gets_wrong_is_refused(scheme: str, change: Change, words: str) -> None:
    report = check(changed(folder(files(quantisation=scheme)), change), "vllm")
    with pytest.raises(PackageError, match=words):
        raise PackageError("\n".join(report.problems))


def test_warnings_name_the_consumer() -> None:
    made = folder(files(dtype=torch.float16, confidence_head=False), served_dtype="bfloat16")
    report = check(changed(made, lambda c, k: c.pop("is_causal")), "sglang")
    assert report.conforms
    text = "\n".join(report.warnings)
    for words in ("SGLang: config.json lacks is_causal", "--dtype bfloat16", "SGLANG_RAGGED_VERIFY_MODE=static"):
        assert words in text
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert "yarn" in str(check(folder(files(target=info(rope_parameters=yarn))), "vllm").warnings)
    assert "not tried" in str(check(folder(files(quantisation="w8a8")), "speculators").warnings)
    assert "lacks dtype" in str(check(changed(made, lambda c, k: c.pop("dtype")), "sglang").warnings)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"embed_scale": 5.5}, "scales its embeddings"),
        ({"max_position_embeddings": 9}, "max_position_embeddings=256, the target has 9"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
    ],
)
def test_another_target_is_refused(over: dict[str, Any], words: str) -> None:
    assert words in "\n".join(check(folder(files(), target=info(**over)), "vllm").problems)


def test_values() -> None:
    with pytest.raises(PackageError, match="norm.weight holds values that are not finite"):
        check_values({"norm.weight": torch.tensor([1.0, float("nan")])}, 9)
    with pytest.raises(PackageError, match="q_scale holds scales"):
        check_values({"q_scale": torch.tensor([1.0, 0.0])}, 9)
    with pytest.raises(PackageError, match="d2t: token 9"):
        check_values({"d2t": torch.tensor([0, 8])}, 9)


def test_a_trained_mask_embedding_is_refused() -> None:
    made = folder(files())
    with_file = Folder(made.config, made.kinds, files=frozenset({"mask_embedding.pt"}))
    assert "trained mask embedding" in str(check(with_file, "sglang").problems)
