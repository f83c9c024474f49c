"""What each layout writes: keys and values, tensors, refusals, and compressed matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.errors import ConfigError, DeepSpecError, PackageError
from deepspec.export.layouts import compressed
from deepspec.export.layouts.registry import chosen_consumers, make_files
from deepspec.export.layouts.write import (
    conformance,
    read_kinds,
    read_weights,
    require_conformance,
    weight_files,
    write_files,
)
from deepspec.nn.int8 import dequantise
from tests.unit.drafters.small import VOCAB
from tests.unit.export.layouts.cases import LLAMA3_ROPE, files, info, source


def test_universal_says_everything_where_each_consumer_looks() -> None:
    config = files(taps=(0, 2, 4)).config
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"] == [0, 2, 4]
    assert config["eagle_aux_hidden_state_layer_ids"] == config["aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (config["architectures"], config["model_type"]) == (["Qwen3DSparkModel"], "qwen3")
    assert (config["block_size"], config["sample_from_anchor"], config["is_causal"]) == (4, True, False)
    assert (config["dtype"], config["max_position_embeddings"]) == ("bfloat16", 256)
    assert (config["markov_rank"], config["dflash_config"]["markov_rank"]) == (8, 8)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.parametrize("kind", ["dspark", "fill_in", "eagle3"])
def test_no_layout_names_code_to_run(kind: str) -> None:
    assert "auto_map" not in str(files(kind).config)


def test_fill_in_blocks_have_one_row_more() -> None:
    assert files("fill_in").config["block_size"] == 5
    made = files("fill_in", layout="speculators").config
    assert (made["block_size"], made["sample_from_anchor"]) == (5, False)
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert made["sliding_window_non_causal"] is True
    assert "model_type" not in made


def test_eagle3_writes_both_lists() -> None:
    config = files("eagle3", taps=(0, 2, 4)).config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert {n.split(".")[0] for n in files("eagle3").tensors} == {"fc", "midlayer", "norm", "lm_head"}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3_ROPE])
def test_rope_reads_the_same_in_old_and_new_transformers(rope: dict[str, Any]) -> None:
    from transformers import Qwen3Config

    config = files(target=info(rope_parameters=rope)).config
    assert config["rope_theta"] == 1e6
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    for values in (config, new, old):
        read = Qwen3Config(**{k: v for k, v in values.items() if k != "model_type"}).rope_parameters
        assert {k: v for k, v in (read or {}).items() if v is not None} == rope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_are_in_the_served_type(dtype: torch.dtype) -> None:
    made = files(dtype=dtype)
    assert {tensor.dtype for tensor in made.tensors.values()} == {dtype}
    assert made.config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets(tied: bool) -> None:
    given = source(include_embeddings=True, tied=tied)
    tensors = make_files("universal", given).tensors
    assert tensors["embed_tokens.weight"].equal(given.drafter.head.embedding.bfloat16())
    assert tensors["lm_head.weight"].equal(given.drafter.head.weight.bfloat16())
    assert tensors["embed_tokens.weight"].equal(tensors["lm_head.weight"]) == tied
    assert "lm_head.weight" not in files(tied=tied).tensors


@pytest.mark.parametrize(
    ("kind", "layout"), [("dspark", "universal"), ("fill_in", "zlab_dflash"), ("eagle3", "eagle3")]
)
def test_a_reduced_vocabulary_brings_the_rows_of_the_head(kind: str, layout: str) -> None:
    given = source(kind, draft_vocab_size=40)
    made = make_files(layout, given)
    vocabulary = given.drafter.vocabulary
    assert vocabulary is not None
    assert made.tensors["lm_head.weight"].equal(given.drafter.head.weight[vocabulary.ids].bfloat16())
    assert made.config["draft_vocab_size"] == 40
    if "t2d" in made.tensors:
        assert made.tensors["t2d"].nonzero().flatten().equal(vocabulary.ids)


def test_a_drafter_without_markov_head_gets_one_of_zeros() -> None:
    made = files("dflash")
    assert made.tensors["markov_head.markov_w2.weight"].shape == (VOCAB, 16)
    assert not made.tensors["markov_head.markov_w2.weight"].any()
    assert (made.config["markov_rank"], made.config["enable_confidence_head"]) == (16, False)


def test_a_folded_temperature_divides_the_log_odds() -> None:
    cold, warm = files().tensors, files(temperature=2.0).tensors
    for part in ("weight", "bias"):
        name = f"confidence_head.proj.{part}"
        assert warm[name].equal(cold[name] / 2)
    assert files(temperature=2.0).config["deepspec"]["folded_temperature"] == 2.0


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("fill_in", "universal", {}, "anchor-first, this drafter is fill_in: use export.layout=zlab_dflash"),
    ("eagle3", "universal", {}, "export.layout=eagle3"),
    ("dspark", "zlab_dflash", {}, "fill-in, this drafter's are anchor_first"),
    ("eagle3", "zlab_dflash", {}, "fill-in"),
    ("eagle3", "speculators", {}, "autoregressive: use export.layout=eagle3"),
    ("dspark", "eagle3", {}, "holds an Eagle3, not a DSparkDrafter"),
    ("eagle3", "eagle3", {"qk_norm": True}, "drops the norms of queries and keys"),
    ("eagle3", "eagle3", {"num_layers": 2}, "set drafter.num_layers=1"),
    ("eagle3", "eagle3", {"sliding_window": 16}, "drafter.sliding_window=16"),
    ("dspark", "universal", {"target": info(embed_scale=5.5)}, "multiplies its embeddings by 5.5"),
    ("dspark", "universal", {"target": info(logit_scale=0.25)}, "multiplies its logits by 0.25"),
    ("fill_in", "zlab_dflash", {"target": info(logit_softcap=30.0)}, "soft-caps its logits at 30"),
    ("dspark", "speculators", {"target": info(logit_softcap=30.0)}, "soft-caps its logits at 30"),
    ("eagle3", "eagle3", {"target": info(embed_scale=5.5)}, "multiplies its embeddings by 5.5"),
    ("fill_in", "zlab_dflash", {"taps": (-1, 2, 4)}, "zlab cannot capture the embedding's output"),
    ("eagle3", "eagle3", {"taps": (-1, 2, 4)}, "sglang cannot capture the embedding's output"),
    ("dspark", "mtp", {}, "holds an MTP-1, not a DSparkDrafter"),
    ("mtp", "mtp", {"draft_vocab_size": 40}, "drafter.draft_vocab_size=null"),
    ("mtp", "mtp", {"quantisation": "w8a8"}, "export.server_quantisation=none"),
    ("mtp", "mtp", {"num_layers": 2}, "drafter.num_layers=1"),
    ("mtp", "eagle3", {}, "holds an Eagle3, not a MTPDrafter"),
    ("dspark", "xyz", {}, "export.layout=xyz must be native, universal"),
]


@pytest.mark.parametrize(("kind", "layout", "over", "words"), REFUSED)
def test_what_a_layout_cannot_hold_is_refused(kind: str, layout: str, over: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        files(kind, layout, **over)


def test_an_overflow_and_a_nan_are_refused_by_name() -> None:
    given = source(dtype=torch.float16)
    given.drafter.get_parameter("norm.weight").data[3] = 7e4
    with pytest.raises(DeepSpecError, match=r"norm\.weight holds 70000.*export\.server_dtype=bf16"):
        make_files("universal", given)
    assert make_files("universal", source()).config["dtype"] == "bfloat16"
    given.drafter.get_parameter("norm.weight").data[3] = float("nan")
    with pytest.raises(DeepSpecError, match=r"norm\.weight holds values that are not finite"):
        make_files("universal", given)


@pytest.mark.parametrize("columns", [1, 4, 6, 64])
def test_packed_values_come_back(columns: int) -> None:
    values = torch.randint(-127, 128, (5, columns), dtype=torch.int8)
    packed = compressed.pack(values)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (5, -(-columns // 4)))
    assert compressed.unpack(packed, columns).equal(values)


def test_the_first_value_is_in_the_lowest_byte() -> None:
    assert compressed.pack(torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)).tolist() == [[0x84838281 - 2**32]]


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compressed_matrix_is_within_half_a_step(scheme: str, dtype: torch.dtype) -> None:
    weight = torch.randn(7, 24)
    weight[3] = 0
    tensors = compressed.compress("x.weight", weight, scheme, dtype)
    scale = tensors["x.weight_scale"]
    assert scale.dtype == (torch.float32 if scheme == "w8a8" else dtype)
    restored = compressed.restore(tensors, "x.weight")
    assert bool(((restored - weight).abs() <= 0.5001 * scale.float()).all())
    if scheme == "w8a8":
        assert restored.equal(dequantise(tensors["x.weight"], scale))


def test_what_is_no_int8_cannot_be_restored() -> None:
    with pytest.raises(PackageError, match="x.weight_scale is missing"):
        compressed.restore({"x.weight": torch.zeros(2, 2, dtype=torch.int8)}, "x.weight")
    with pytest.raises(PackageError, match="is not INT8"):
        compressed.restore({"x.weight": torch.zeros(2, 2), "x.weight_scale": torch.ones(2, 1)}, "x.weight")
    with pytest.raises(PackageError, match="x.weight_shape is missing"):
        compressed.restore({"x.weight_packed": torch.zeros(2, 1), "x.weight_scale": torch.ones(2, 1)}, "x.weight")


@pytest.mark.parametrize("quantisation", ["none", "w8a8", "w8a16"])
def test_what_is_written_is_read_and_conforms(tmp_path: Path, quantisation: str) -> None:
    made = files(quantisation=quantisation)
    write_files(tmp_path, made)
    for name, tensor in read_weights(tmp_path).items():
        assert tensor.equal(made.tensors[name]) and tensor.dtype == made.tensors[name].dtype
    reports = conformance(tmp_path, ("vllm", "sglang"), info(), "bfloat16")
    require_conformance(reports, all_of_them=True)
    assert [report.warnings for report in reports] == [(), ()]


def test_large_weights_are_sharded(tmp_path: Path) -> None:
    made = files()
    write_files(tmp_path, made, shard_bytes=20_000)
    assert len(weight_files(tmp_path)) > 2
    assert read_kinds(tmp_path).keys() == made.tensors.keys()
    assert all(path.stat().st_size < 30_000 for path in weight_files(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../x.safetensors"}}')
    with pytest.raises(PackageError, match="not a file beside it"):
        weight_files(tmp_path)


def test_a_wanted_consumer_that_cannot_load_it_stops_the_export(tmp_path: Path) -> None:
    write_files(tmp_path, files(markov_head="gated"))
    reports = conformance(tmp_path, ("vllm", "sglang"), info(), "bfloat16")
    require_conformance(reports, all_of_them=False)
    with pytest.raises(PackageError, match=r"vLLM: markov_head_type='gated'"):
        require_conformance(reports, all_of_them=True)


def test_mtp_is_one_more_layer_of_its_target() -> None:
    made = files("mtp")
    assert {name.rpartition("model.layers.6.")[1] for name in made.tensors} == {"model.layers.6."}
    assert {"model.layers.6.eh_proj.weight", "model.layers.6.shared_head.norm.weight"} < set(made.tensors)
    assert made.extras["merge.json"]["weight_map"].keys() == made.tensors.keys()
    assert chosen_consumers("mtp", (), False) == ()
    with pytest.raises(ConfigError, match="no server that was verified"):
        chosen_consumers("mtp", ("vllm",), False)


def test_consumers() -> None:
    assert chosen_consumers("universal", (), False) == ("vllm", "sglang", "speculators")
    assert chosen_consumers("universal", (), True)[-1] == "published_eval"
    assert chosen_consumers("zlab_dflash", ("vllm",), False) == ("vllm",)
    with pytest.raises(ConfigError, match="export.consumer=sglang: export.layout=speculators is for speculators, vllm"):
        chosen_consumers("speculators", ("sglang",), False)
