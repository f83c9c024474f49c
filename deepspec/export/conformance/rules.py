"""What has to agree beyond single keys: tapped layers, ids, rotary scaling, and the target that is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspec.errors import ConfigError
from deepspec.export.conformance.folder import Finding, Folder, refused, warned
from deepspec.export.conformance.quantised import fused_findings, scheme_findings, scheme_of, target_findings
from deepspec.targets.layers import TAP_KEYS, read_taps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT_ROPE = ("yarn", "longrope", "dynamic")
HELD = ("gated", "rnn")
MASK_FILE = "mask_embedding.pt"


def taps(order: tuple[str, ...]) -> Callable[[Folder], Iterator[Finding]]:
    """Return the rule for a consumer that takes the first of the keys in ``order``."""

    def rule(folder: Folder) -> Iterator[Finding]:
        try:
            read_taps(folder.config)
        except ConfigError as error:
            yield refused(str(error))
            return
        chosen = next((key for key in order if key in folder.taps), None)
        if chosen is None:
            yield refused(f"config.json names no tapped layers: one of {', '.join(order)} is needed")
            return
        yield from _tap_findings(folder, chosen)

    return rule


def _tap_findings(folder: Folder, chosen: str) -> Iterator[Finding]:
    ids, layers = folder.taps[chosen], _target_layers(folder)
    if list(ids) != sorted(set(ids)) or not ids:
        yield refused(f"{chosen} stands for layers {list(ids)}, which must rise strictly: servers sort them")
    if layers and any(layer >= layers - 1 for layer in ids):
        yield refused(
            f"{chosen} stands for layers {list(ids)} of {layers}: the last one cannot be captured before the final norm"
        )
    if any(layer < -1 for layer in ids):
        yield refused(f"{chosen} stands for layers {list(ids)}: there is none below the embedding (-1)")
    for key, other in folder.taps.items():
        if other != ids:
            yield refused(
                f"{key} stands for layers {list(other)}, {chosen} for {list(ids)} (outputs, counted from 0): "
                f"{key} counts as {TAP_KEYS[key]} does"
            )


def _target_layers(folder: Folder) -> int:
    return folder.target.num_layers if folder.target else folder.number("num_target_layers")


def no_embedding_tap(folder: Folder) -> Iterator[Finding]:
    """Refuse the embedding's output as a tap."""
    for key, ids in folder.taps.items():
        if -1 in ids:
            yield refused(f"{key} taps the embedding's output (-1), which cannot be captured")
            return


def mask_token(folder: Folder) -> Iterator[Finding]:
    """Refuse mask ids that are no row of the embedding, or differ from place to place."""
    found = {key: folder.get(key) for key in ("mask_token_id", "dflash_config.mask_token_id")}
    vocab = folder.number("vocab_size")
    for key, value in found.items():
        if type(value) is int and not 0 <= value < vocab:
            yield refused(f"{key}={value} must be in 0 .. {vocab - 1}, the embedding's rows")
    if len({value for value in found.values() if value is not None}) > 1:
        yield refused(f"mask_token_id={found['mask_token_id']} contradicts dflash_config.mask_token_id")
    if MASK_FILE in folder.files:
        yield refused(f"{MASK_FILE} is a trained mask embedding, which servers do not read for a DSpark")


def nested_agrees(folder: Folder) -> Iterator[Finding]:
    """Refuse a ``dflash_config`` that contradicts the top level: consumers look into either."""
    section = folder.get("dflash_config")
    for key, value in section.items() if isinstance(section, Mapping) else ():
        top = folder.keys.get(key)
        if key != "target_layer_ids" and top is not None and top != value:
            yield refused(f"dflash_config.{key}={value!r} contradicts {key}={top!r}")


def vanilla_only(folder: Folder) -> Iterator[Finding]:
    """Refuse Markov heads that only some consumers know."""
    kind = folder.get("markov_head_type")
    if folder.number("markov_rank") > 0 and kind in HELD:
        yield refused(f"markov_head_type={kind!r}: only 'vanilla' is built, and its tensors then have unknown names")


def some_rank(folder: Folder) -> Iterator[Finding]:
    """Refuse a DSpark without a Markov head."""
    if folder.number("markov_rank") < 1:
        yield refused(f"markov_rank={folder.get('markov_rank')!r} must be above 0; a head of zeros does no harm")


def whole_vocabulary(folder: Folder) -> Iterator[Finding]:
    """Refuse a reduced vocabulary."""
    if folder.is_reduced:
        yield refused(
            f"draft_vocab_size={folder.draft_vocab_size} of {folder.number('vocab_size')}: the target's whole head is "
            "used, and the Markov matrices then have the wrong shape"
        )


def confidence_for_ragged(folder: Folder) -> Iterator[Finding]:
    """Warn where dynamic verification has no confidence to go by."""
    if folder.get("enable_confidence_head") is not True:
        yield warned("there is no confidence head: only SGLANG_RAGGED_VERIFY_MODE=static (the default) can serve it")


def rope(folder: Folder) -> Iterator[Finding]:
    """Refuse rotary parameters that say two things, and warn of scaling that depends on the length."""
    section = folder.get("rope_parameters")
    if not isinstance(section, Mapping):
        return
    theta, legacy = section.get("rope_theta"), folder.get("rope_theta")
    if theta is None:
        yield refused("rope_parameters.rope_theta is missing: each consumer has another default")
    elif legacy is not None and legacy != theta:
        yield refused(f"rope_theta={legacy} contradicts rope_parameters.rope_theta={theta}")
    scaling = folder.get("rope_scaling")
    if isinstance(scaling, Mapping):
        different = [key for key, value in scaling.items() if key != "rope_theta" and section.get(key) != value]
        if different:
            yield refused(f"rope_scaling contradicts rope_parameters in {', '.join(sorted(different))}")
    if section.get("rope_type") in SHORT_ROPE:
        yield warned(f"rope_type={section['rope_type']!r} depends on the length that is served: serve what was trained")


def sliding(folder: Folder) -> Iterator[Finding]:
    """Refuse a window that the layers do not use, or the reverse."""
    types, window = folder.get("layer_types"), folder.get("sliding_window")
    slides = isinstance(types, list) and "sliding_attention" in types
    if slides and type(window) is not int:
        yield refused(f"layer_types slides, but sliding_window={window!r}")
    if isinstance(types, list) and len(types) != folder.number("num_hidden_layers"):
        yield refused(f"layer_types has {len(types)} entries, num_hidden_layers={folder.get('num_hidden_layers')}")


def served_target(folder: Folder) -> Iterator[Finding]:
    """Compare the config with the target at hand."""
    target = folder.target
    if target is None:
        return
    pairs = {
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": dict(target.rope_parameters),
    }
    for key, value in pairs.items():
        found = folder.get(key)
        if found is not None and found != value:
            yield refused(f"{key}={found!r}, the target has {value!r}")
    if target.embed_scale != 1.0 or target.logit_scale != 1.0 or target.logit_softcap is not None:
        yield refused(
            f"{target.name} scales its embeddings or logits ({target.embed_scale:.6g}, {target.logit_scale:.6g}, "
            f"soft-cap {target.logit_softcap}), which the draft model does not"
        )


def served_dtype(folder: Folder) -> Iterator[Finding]:
    """Warn where the folder's 16-bit type is not the one that the target is served in."""
    found = folder.get("dtype")
    if folder.served_dtype is not None and found is not None and found != folder.served_dtype:
        yield warned(
            f"dtype={found!r}, but the target is served in {folder.served_dtype}: vLLM casts, SGLang runs the draft in "
            f"{found} unless it is started with --dtype {folder.served_dtype}"
        )


def number_of_taps(folder: Folder) -> Iterator[Finding]:
    """Refuse another number of taps than there are."""
    found, many = folder.get("num_aux_hidden_states"), {len(ids) for ids in folder.taps.values()}
    if found is not None and many and many != {found}:
        yield refused(f"num_aux_hidden_states={found!r}, but {sorted(many)} layers are tapped")


def section_agrees(folder: Folder) -> Iterator[Finding]:
    """Refuse a section of the layers' keys that contradicts the top level, where a folder has both."""
    section = folder.config.get("transformer_layer_config")
    if folder.is_speculators or not isinstance(section, Mapping):
        return
    for key, value in section.items():
        if key in folder.config and folder.config[key] != value:
            yield refused(f"transformer_layer_config.{key}={value!r} contradicts {key}={folder.config[key]!r}")


def no_auto_map(folder: Folder) -> Iterator[Finding]:
    """Refuse a config that names code to run."""
    if "auto_map" in folder.config:
        yield refused("auto_map names code to run: it is never written")


def not_quantised(folder: Folder) -> Iterator[Finding]:
    """Refuse quantised weights for a consumer that reads plain ones."""
    if scheme_of(folder) is not None:
        yield refused("quantization_config: it reads 16-bit weights only")


def quantised_untried(folder: Folder) -> Iterator[Finding]:
    """Warn where nobody has looked what the consumer makes of quantised weights."""
    if scheme_of(folder) is not None:
        yield warned("quantization_config: it was not tried with quantised weights")


def class_targets(folder: Folder) -> Iterator[Finding]:
    """Refuse targets by name where linears have none."""
    yield from target_findings(folder)


def schemes(folder: Folder) -> Iterator[Finding]:
    """Refuse schemes that servers do not load."""
    yield from scheme_findings(folder)


def fused(name_of: Callable[[str, Folder], str]) -> Callable[[Folder], Iterator[Finding]]:
    """Return the rule that fused matrices are quantised alike, for a consumer that names modules so."""

    def rule(folder: Folder) -> Iterator[Finding]:
        yield from fused_findings(folder, name_of)

    return rule


def speculators_proposal(folder: Folder) -> Iterator[Finding]:
    """Refuse a number of drafted tokens that the block does not have."""
    methods = folder.get("speculators_config.proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    tokens, size = first.get("speculative_tokens"), folder.number("block_size")
    expected = size if folder.get("sample_from_anchor") is True else size - 1
    if tokens != expected:
        yield refused(
            f"speculators_config.proposal_methods[0].speculative_tokens={tokens!r} must be {expected} for "
            f"block_size={size}, sample_from_anchor={folder.get('sample_from_anchor')!r}"
        )
