"""How exact the gradient of the total variation is on the draft's states, against float64.

    python -m tests.bench.accuracy                    # states of the quickstart's target, from the cache
    python -m tests.bench.accuracy --quick            # a tiny random target: does the code still run

The states are the target's own on texts of the quickstart; the draft's lie between those of one position and the
position before it, and only rows with an acceptance above 0.95 count: there p and q differ by little, and the sign of
their difference is what rounding spoils. float64 is given the very values that the other computations are given. The
last of the bf16 lines is the least error possible, since the gradient leaves in the precision of the states.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspec.log import emit
from deepspec.losses import rows
from deepspec.losses.fused import block_loss
from deepspec.losses.task import RowTask
from deepspec.nn.head import FrozenHead
from tests.bench import common
from tests.bench.published import slot_losses

if TYPE_CHECKING:
    from deepspec.losses.task import LossMode
    from deepspec.targets.target import Target

LEAST_ACCEPTANCE = 0.95
SHARES = (0.02, 0.05, 0.1, 0.2)  # of the position before
NUM_TEXTS, NUM_ROWS = 8, 128
COLUMNS = ("precision", "gradient", "relative error", "median row", "worst row")


def text_states(target: Target) -> Tensor:
    """Return the final-normed states [n, D] that judge the answers of some texts of the quickstart."""
    from deepspec.data.conversations import as_dicts, read_conversations

    states = []
    for conversation in islice(read_conversations(common.ROOT / "data/quickstart/train.jsonl"), NUM_TEXTS):
        messages = as_dicts(conversation.messages)
        ids = _encoded(target, messages)
        first = _encoded(target, messages[:-1], add_generation_prompt=True).shape[1] - 1  # judges the first token
        step = target.step(ids, target.new_cache(ids.shape[1]), num_logits=1)
        states.append(step.last_hidden[first:])
    return torch.cat(states)


def _encoded(target: Target, messages: list[dict[str, str]], **options: Any) -> Tensor:
    encoded = target.tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **options)
    ids: Tensor = encoded["input_ids"]
    return ids


def random_states(target: Target) -> Tensor:
    """Return final-normed states [n, D] of random tokens."""
    ids = torch.randint(4, target.info.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    return target.step(ids, target.new_cache(64), num_logits=1).last_hidden


def close_pairs(states: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor, float]:
    """Return states [R, D] of draft and target that agree and their mean acceptance; bf16 holds the states exactly."""
    drafts = _as_bf16(torch.cat([states[1:].lerp(states[:-1], share) for share in SHARES]))
    targets = _as_bf16(states[1:].repeat(len(SHARES), 1))
    order = torch.randperm(len(drafts), generator=torch.Generator().manual_seed(0))[: 8 * NUM_ROWS]
    drafts, targets = drafts[order], targets[order]
    accepted = torch.cat(
        [
            1.0 - 0.5 * rows.l1_distance(head.logits(a).double(), head.logits(b).double())
            for a, b in zip(drafts.split(64), targets.split(64), strict=True)
        ]
    )
    kept = (accepted > LEAST_ACCEPTANCE).nonzero().squeeze(1)[:NUM_ROWS]
    return drafts[kept], targets[kept], float(accepted[kept].mean())


def _as_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def exact_gradient(draft: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [R, D] of the sum of the total variations in fp64."""
    states = draft.double().requires_grad_()
    wide = weight.double()
    (0.5 * rows.l1_distance(states @ wide.t(), target.double() @ wide.t())).sum().backward()
    return _gradient_of(states)


def our_gradient(draft: Tensor, target: Tensor, head: FrozenHead, mode: LossMode) -> Tensor:
    """Return the gradient of the one-pass loss."""
    states, count = draft.clone().requires_grad_(), len(draft)
    task = RowTask(
        target_hidden=target,
        target_index=torch.arange(count, device=draft.device),
        labels=torch.zeros(count, dtype=torch.int64, device=draft.device),
        weights=torch.ones(count, device=draft.device),
        head=head,
        ce=0.0,
        l1=0.5,
        mode=mode,
    )
    block_loss(states, task).total.backward()
    return _gradient_of(states)


def published_gradient(draft: Tensor, target: Tensor, head: FrozenHead) -> Tensor:
    """Return the gradient through logits in the precision of the head."""
    states = draft.clone().requires_grad_()
    labels = torch.zeros(len(draft), dtype=torch.int64, device=draft.device)
    _, l1, _ = slot_losses(head.logits(states), head.logits(target), labels)
    (0.5 * l1).sum().backward()
    return _gradient_of(states)


def _gradient_of(states: Tensor) -> Tensor:
    if states.grad is None:
        raise RuntimeError("no gradient reached the states")
    return states.grad.double()


def errors(states: Tensor, head: FrozenHead) -> tuple[int, float, dict[tuple[str, str], list[float]]]:
    """Return rows, mean acceptance, and by precision and way the relative error: of all, median row, worst row."""
    found: dict[tuple[str, str], list[float]] = {}
    draft, target, accepted = close_pairs(states, head)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        own, judged, cut = draft.to(dtype), target.to(dtype), head.to(dtype=dtype)
        expected = exact_gradient(own, judged, cut.weight)
        ways = {"exact": our_gradient(own, judged, cut, "exact"), "published": published_gradient(own, judged, cut)}
        if dtype == torch.bfloat16:
            ways["common_mode"] = our_gradient(own, judged, cut, "common_mode")
            ways["float64, rounded to bf16"] = expected.to(dtype).double()
        for way, gradient in ways.items():
            by_row = (gradient - expected).norm(dim=-1) / expected.norm(dim=-1)
            whole = (gradient - expected).norm() / expected.norm()
            found[precision, way] = [float(whole), float(by_row.median()), float(by_row.max())]
    return len(draft), accepted, found


def target_states(*, quick: bool, device: torch.device) -> tuple[Tensor, FrozenHead, str] | None:
    """Return fp32 states, the head and the target's name; None where the target is not in the cache."""
    if quick:
        from tests.helpers import tiny_target

        tiny = tiny_target()
        return random_states(tiny), tiny.head, tiny.info.name
    from deepspec.config.compose import compose_run
    from deepspec.targets.load import load_target

    cfg = compose_run(["recipe=quickstart"])
    if not Path(cfg.target.path).is_dir():
        emit(f"accuracy not measured: {cfg.target.path} is not there; python -m deepspec.prepare recipe=quickstart")
        return None
    target = load_target(cfg.target, "cpu", torch.float32)
    return text_states(target).to(device), target.head.to(device), target.info.name


def report(*, quick: bool) -> dict[tuple[str, str], list[float]]:
    """Print the table; return the errors by precision and way."""
    device = torch.device("cpu") if quick else common.choose_device("auto")
    known = target_states(quick=quick, device=device)
    if known is None:
        return {}
    states, head, name = known
    count, accepted, found = errors(states, head)
    emit(f"gradient of the total variation on {count} states of {name}, mean acceptance {accepted:.3f}\n")
    common.emit_columns(COLUMNS)
    for (precision, way), values in found.items():
        common.emit_row([precision, way, *(f"{value:.1e}" for value in values)])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny target")
    arguments = parser.parse_args(argv)
    common.emit_header("tests.bench.accuracy", common.choose_device("auto"), argv)
    report(quick=arguments.quick)


if __name__ == "__main__":
    main()
