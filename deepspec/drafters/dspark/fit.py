"""Fit the first layer of a drafter to its target by least squares, before the first step of training.

The layers behind it are the target's last ones (``initialise.py``), which read the state that the target has a few
layers before its end. So the first layer has one job: to say that state for each slot, from the target's states up to
the anchor and from the anchor's token. Gradient descent needs thousands of samples to find that out; as a chain of
linear problems it takes a few hundred samples and less than a minute:

1. Queries and keys are placed by hand. Head norms take their lengths away, so one direction for every query, one sign
   for the context's keys and the other for the block's own make a head that looks at the context and not at the block.
   Spread over the rotary pairs with the weights of exp(-distance / RANGE) it looks at the nearest of it; the heads of a
   group differ in sharpness. The heads of the last third of the groups look at slot 0 instead.
2. Values are the inputs that matter most: a ridge regression of the wanted state on the nearest context and on slot 0,
   cut to the rank of the groups in the metric of the target's logits.
3. The output projection is a ridge regression of the wanted state on what the heads bring.
4. In the MLP half of the gates open for slot 0 and half for the other slots, which makes it linear for each; up is a
   rotation, down a ridge regression of what is still missing.
5. The Markov head is a ridge regression of the target's last state on the previous token's embedding, cut to its rank.

All of it goes on learning, and nothing of it changes the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from deepspec.drafters.dspark import objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Features
    from deepspec.drafters.dspark.heads import MarkovHead
    from deepspec.drafters.dspark.model import BlockArguments, DSparkDrafter

    Example = tuple[Batch, Features]

RANGE = 8.0  # positions over which the score of a head falls e-fold
SHARPNESS = 60.0  # largest score of a head
BLUNTEST = 0.1  # share of it that the bluntest head of a group has
PROJECTION_RMS = 0.05  # of query and key weights, whose lengths the head norms take away
OPEN_GATE = 4.0
RIDGE = 0.2  # times the mean square of each input; a tenth of it left weights that INT8 could not hold
GATE_RIDGE = 1.0  # the direction of a gate leans on many channels, which can be rounded
MARKOV_RIDGE = 0.1
HEAD_ROWS = 2**14  # rows of the head that stand for all of them in the metric


@torch.no_grad()
def fit_first_layer(drafter: DSparkDrafter, examples: Sequence[Example]) -> list[str]:
    """Fit the first layer and the Markov head of a drafter whose other layers are the target's last ones.

    ``examples`` are batches with the target's features; a few hundred samples are enough. Returns a line for each part.
    """
    _LayerFit(drafter, examples).run()
    lines = [f"layers.0 fitted to the target's layer {drafter.conventions.target_layer_ids[-1]}"]
    if drafter.markov_head is not None:
        _fit_markov(drafter, drafter.markov_head, examples)
        lines.append("the Markov head fitted to the target's last state")
    return lines


class LeastSquares:
    """A ridge regression whose rows come in parts."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self._gram = torch.zeros(inputs, inputs, device=device)
        self._cross = torch.zeros(inputs, outputs, device=device)
        self._weight = torch.zeros((), device=device)

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take rows ``x`` [R, inputs] and ``y`` [R, outputs] with weights [R]."""
        weighted = x * weight[:, None]
        self._gram.addmm_(weighted.t(), x)
        self._cross.addmm_(weighted.t(), y)
        self._weight += weight.sum()

    @property
    def moment(self) -> Tensor:
        """Mean of x x^T [inputs, inputs]."""
        return self._gram / self._weight

    def solve(self, ridge: float) -> Tensor:
        """Return A [inputs, outputs] with least |x A - y|^2 + ridge |A|^2, where every input has a mean square of 1.

        In double precision: a few channels of a target's states are a thousand times the others.
        """
        gram, cross = self._gram.double(), self._cross.double()
        squares = gram.diagonal()
        scale = squares.clamp(min=1e-12 * float(squares.max()) + 1e-30).sqrt()  # [inputs]
        gram = gram / scale / scale[:, None]
        gram.diagonal().add_(ridge)
        return (torch.linalg.solve(gram, cross / scale[:, None]) / scale[:, None]).to(self._cross.dtype)


@dataclass(frozen=True)
class _Rows:
    """The slots of one example in front of the first layer."""

    arguments: BlockArguments
    slots: objective.Rows  # the supervised ones
    context: Tensor  # [n, D] every position of the context
    nearest: Tensor  # [R, D] the position before each slot's anchor
    first: Tensor  # [R, D] normed state of slot 0 of each slot's block
    state: Tensor  # [R, D] the slot's own state
    missing: Tensor  # [R, D] the wanted state less ``state``

    @property
    def is_first(self) -> Tensor:
        """Whether each row [R] is its block's slot 0."""
        return self.slots.slot == 0


class _LayerFit:
    """The first layer, its examples, and the steps of the fit in their order."""

    def __init__(self, drafter: DSparkDrafter, examples: Sequence[Example]) -> None:
        self.drafter, self.layer = drafter, drafter.decoder_layers[0]
        self.width, self.device = drafter.fc.out_features, drafter.fc.weight.device
        self.groups = drafter.target.num_key_value_heads
        self.on_first = (self.groups + 1) // 3  # groups that look at slot 0
        self.layer.input_layernorm.weight.fill_(1.0)
        self.examples = [self._rows(batch, features) for batch, features in examples]

    def run(self) -> None:
        self._place_queries_and_keys()
        self._fit_values()
        self._fit_output()
        self._fit_mlp()

    def _rows(self, batch: Batch, features: Features) -> _Rows:
        slots = objective.supervised_rows(self.drafter.config, batch)
        arguments = self.drafter.block_arguments(batch, features.hidden)
        states = arguments.x.flatten(0, 1)
        state = states[slots.index].float()
        wanted = features.hidden[..., -self.width :].flatten(0, 1)[slots.position].float()
        before = (slots.position - slots.slot - 1).clamp(min=0)
        return _Rows(
            arguments=arguments,
            slots=slots,
            context=arguments.context[batch.segment_ids > 0].float(),
            nearest=arguments.context.flatten(0, 1)[before].float(),
            first=self.layer.input_layernorm(states[slots.index - slots.slot]).float(),
            state=state,
            missing=wanted - state,
        )

    def _place_queries_and_keys(self) -> None:
        attention, dim = self.layer.self_attn, self.drafter.target.head_dim
        near, still = _directions(self.drafter.rope.inverse_frequencies.to(self.device), dim)
        context = torch.cat([rows.context for rows in self.examples])
        first, others = self._by_slot([self.layer.input_layernorm(rows.state) for rows in self.examples])
        anywhere = _separate(torch.cat((first, others)))
        keys = [torch.outer(near, _separate(context, first, others))] * (self.groups - self.on_first)
        keys += [torch.outer(still, _separate(first, context, others))] * self.on_first
        heads = self.drafter.target.num_attention_heads // self.groups
        shares = [BLUNTEST ** (head / max(1, heads - 1)) for head in range(heads)]
        directions = [share * near + (1 - share**2) ** 0.5 * still for share in shares]
        queries = [torch.outer(d, anywhere) for d in directions] * (self.groups - self.on_first)
        queries += [torch.outer(still, anywhere)] * (heads * self.on_first)
        for linear, parts in ((attention.q_proj, queries), (attention.k_proj, keys)):
            weight = torch.cat(parts)
            linear.weight.copy_(weight * (PROJECTION_RMS / weight.square().mean().sqrt()))
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_((SHARPNESS / dim**0.5) ** 0.5)  # scores are products over sqrt(Dh)

    def _by_slot(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Part the rows of all examples into those of slot 0 and the others."""
        is_first = torch.cat([rows.is_first for rows in self.examples])
        joined = torch.cat(states)
        return joined[is_first], joined[~is_first]

    def _fit_values(self) -> None:
        width = self.width
        fit = LeastSquares(2 * width, width, self.device)
        for rows in self.examples:
            fit.add(torch.cat((rows.nearest, rows.first), dim=1), rows.missing, rows.slots.weight)
        solution, moment = fit.solve(RIDGE), fit.moment
        metric = _logit_metric(self.drafter, self.drafter.norm.weight)
        parts = []
        for part, groups in ((slice(0, width), self.groups - self.on_first), (slice(width, None), self.on_first)):
            rank = groups * self.drafter.target.head_dim
            parts.append(_leading_inputs(solution[part], moment[part, part], metric, rank).t())
        self.layer.self_attn.v_proj.weight.copy_(torch.cat(parts))

    def _fit_output(self) -> None:
        attention = self.layer.self_attn
        fit = LeastSquares(attention.o_proj.in_features, self.width, self.device)
        for rows in self.examples:
            fit.add(self._brought(rows), rows.missing, rows.slots.weight)
        attention.o_proj.weight.copy_(fit.solve(RIDGE).t())

    def _brought(self, rows: _Rows) -> Tensor:
        """Return what the heads bring to each row, [R, H * Dh]."""
        normed = rows.arguments._replace(x=self.layer.input_layernorm(rows.arguments.x))
        mixed = self.layer.self_attn.mix(*normed, self.drafter.attention_backend)
        return mixed.flatten(0, 1)[rows.slots.index].float()

    def _fit_mlp(self) -> None:
        layer, mlp = self.layer, self.layer.mlp
        added = [layer.self_attn.o_proj(self._brought(rows)) for rows in self.examples]
        states = [rows.state + more for rows, more in zip(self.examples, added, strict=True)]
        size = torch.cat(states).square().mean(0).sqrt()  # [D]
        middle = size.median().clamp(min=1e-6)
        layer.post_attention_layernorm.weight.copy_(middle / size.clamp(min=1e-2 * float(middle)))
        normed = [layer.post_attention_layernorm(state) for state in states]
        self._open_gates(*self._by_slot(normed))
        fit = LeastSquares(mlp.gate_proj.out_features, self.width, self.device)
        for rows, more, x in zip(self.examples, added, normed, strict=True):
            fit.add(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x), rows.missing - more, rows.slots.weight)
        mlp.down_proj.weight.copy_(fit.solve(RIDGE).t())

    def _open_gates(self, first: Tensor, others: Tensor) -> None:
        """Let units answer to slot 0 and to the other slots in turn, each kind with a rotation of the state.

        Units beyond two rotations get gates that are neither open nor shut.
        """
        mlp, width, inner = self.layer.mlp, self.width, self.layer.mlp.gate_proj.out_features
        scale = 1.0 / torch.cat((first, others)).square().mean().sqrt()
        side = _separate(first, others, ridge=GATE_RIDGE) * OPEN_GATE
        rotation = torch.linalg.qr(torch.randn(width, width, device=self.device)).Q
        paired = min(inner, 2 * width)
        mlp.gate_proj.weight.zero_()
        mlp.gate_proj.weight[:paired:2], mlp.gate_proj.weight[1:paired:2] = side, -side
        mlp.up_proj.weight[:paired] = (rotation * scale).repeat_interleave(2, dim=0)[:paired]
        if inner > paired:
            rest = torch.randn(2, inner - paired, width, device=self.device) * scale / width**0.5
            mlp.gate_proj.weight[paired:], mlp.up_proj.weight[paired:] = rest[0], rest[1]


def _fit_markov(drafter: DSparkDrafter, markov: MarkovHead, examples: Sequence[Example]) -> None:
    head, width = drafter.head, drafter.fc.out_features
    fit = LeastSquares(width, width, drafter.fc.weight.device)
    for batch, features in examples:
        slots = objective.supervised_rows(drafter.config, batch)
        states = drafter.block_states(batch, features.hidden).flatten(0, 2)[slots.index].float()
        missing = features.last_hidden.flatten(0, 1)[slots.position].float() - states
        fit.add(head.embed(slots.previous).float(), missing, slots.weight)
    before, behind = _root(fit.moment), _root(_logit_metric(drafter))
    left, size, right = torch.linalg.svd(before.half @ fit.solve(MARKOV_RIDGE) @ behind.half, full_matrices=False)
    rank = markov.markov_w1.embedding_dim
    share = size[:rank].sqrt()
    inputs = before.inverse_half @ left[:, :rank] * share  # [D, r]
    outputs = behind.inverse_half @ right[:rank].t() * share
    tokens = torch.arange(head.embedding.shape[0], device=inputs.device)
    markov.markov_w1.weight.copy_(_widen(head.embed(tokens).float() @ inputs, rank))
    rows = drafter.draft_head.weight.float()
    markov.markov_w2.weight.copy_(_widen(rows @ outputs * head.logit_scale, rank))


def _separate(positive: Tensor, *negative: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return w [D] with w x near 1 for rows of ``positive`` and near -1 for the others; each group weighs the same."""
    fit = LeastSquares(positive.shape[1], 1, positive.device)
    for rows, sign in ((positive, 1.0), *((rows, -1.0) for rows in negative if len(rows))):
        ones = torch.ones(len(rows), 1, device=rows.device)
        fit.add(rows.float(), sign * ones, ones[:, 0] / len(rows))
    return fit.solve(ridge)[:, 0]


def _directions(frequencies: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return two unit vectors [Dh]: one whose rotated products fall with the distance, one that rotation spares most.

    sum_i w_i cos(f_i d) is about exp(-d / RANGE) for weights w of a Cauchy density; the slowest pair stays out of it.
    """
    pairs = frequencies.shape[0]
    scaled = frequencies.float() * RANGE
    weights = scaled / (1.0 + scaled.square())
    weights[-1] = 0.0 if pairs > 1 else weights[-1]
    near, still = torch.zeros(dim, device=weights.device), torch.zeros(dim, device=weights.device)
    near[:pairs] = (weights / weights.sum()).sqrt()
    still[-1 if 2 * pairs < dim else pairs - 1] = 1.0  # a channel that is not turned at all, where there is one
    return near, still


def _logit_metric(drafter: DSparkDrafter, scale: Tensor | None = None) -> Tensor:
    """Return the mean square of a logit's change as a form [D, D] on states, multiplied by ``scale`` first."""
    weight = drafter.head.weight
    rows = weight[:: max(1, weight.shape[0] // HEAD_ROWS)].float()
    rows = rows - rows.mean(0)  # what all logits share changes nothing
    if scale is not None:
        rows = rows * scale.float()
    return rows.t() @ rows / rows.shape[0]


@dataclass(frozen=True)
class _Root:
    half: Tensor  # F^(1/2)
    inverse_half: Tensor  # F^(-1/2)


def _root(form: Tensor) -> _Root:
    """Return the roots of a symmetric positive form, its smallest eigenvalues lifted."""
    values, vectors = torch.linalg.eigh(form.double())
    values = values.clamp(min=1e-6 * float(values.mean()) + 1e-30)
    half, inverse = ((vectors * values.pow(power)) @ vectors.t() for power in (0.5, -0.5))
    return _Root(half.to(form.dtype), inverse.to(form.dtype))


def _leading_inputs(solution: Tensor, moment: Tensor, metric: Tensor, rank: int) -> Tensor:
    """Return the ``rank`` input directions [D, rank] of unit variance that carry most of x ``solution``."""
    root = _root(moment)
    left = torch.linalg.svd(root.half @ solution @ _root(metric).half, full_matrices=False).U
    return _widen(root.inverse_half @ left[:, :rank], rank)


def _widen(columns: Tensor, width: int) -> Tensor:
    """Fill up with columns of zeros."""
    return functional.pad(columns, (0, width - columns.shape[1]))
