"""Fit the first layer of a drafter to its target by least squares, before the first step of training.

The layers behind it are the target's last ones (``initialise.py``), which read the state that the target has a few
layers before its end. So the first layer has one job: to say that state for each slot, from the target's states up to
the anchor and from the anchor's token. Gradient descent needs thousands of samples to find that out; as a chain of
linear problems it takes a few hundred samples and about a minute:

1. ``fc`` writes a short sketch of each position's token into the directions in which the tap that it passes on says
   least. The layers that were copied learn to overlook them.
2. Queries and keys are placed by hand. Head norms take their lengths away, so a key is the sum of three directions
   that rotation treats differently: one whose product falls with the distance, one that stays as it is and tells the
   block from its context, and slow channels for the sketch. The heads have three jobs, in turn. The first looks at the
   nearest context. The second looks, from slot 0, for the last place where the anchor's token stood (else at slot 0
   itself), and from the other slots at slot 0. The third tells the two kinds of slots apart: it looks at the context
   from slot 0, and at the masks from the others.
3. Values are the inputs that matter most to what those jobs read: ridge regressions of the wanted state, cut to the
   width of the groups in the metric of the target's logits.
4. The output projection puts what the heads bring into the directions in which embeddings of anchors say least, so that
   the MLP can tell both apart. (Adding an estimate of the wanted state instead mixes the two up.)
5. Half of the MLP's gates open for slot 0 and half for the other slots, by a channel that the third job drives. Each
   half then is linear but for its spare units: up is a rotation, down a ridge regression of the wanted state.

All of it goes on learning, and nothing of it changes the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from deepspec.drafters import objective
from deepspec.drafters.blocks.initialise import passed_tap
from deepspec.drafters.blocks.least_squares import (
    LeastSquares,
    leading_inputs,
    quiet_directions,
    root,
    separate,
)
from deepspec.nn.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Features
    from deepspec.drafters.blocks.model import BlockArguments, BlockDrafter

    Example = tuple[Batch, Features]

NEAREST, TOKEN, SIDE = range(3)  # jobs of heads

RANGE = 8.0  # positions over which the score of the nearest context falls e-fold
SPAN = 128  # positions over which the channels of the sketch turn by less than 1
SHARPNESS = 80.0  # largest score of a head
SELF = 0.12  # of a query asks for slot 0: more than two sketches are alike by accident, less than a match
PROJECTION_RMS = 0.05  # of query and key weights, whose lengths the head norms take away

SKETCH_FLOOR = 0.05  # embedding directions weaker than this share of the mean are not blown up to it
SKETCH_SHARE = 0.125  # most of the context's directions that sketches take
SKETCH_SIZE = 6.0  # length of a sketch in the context, where a state has length sqrt(D)
QUIET_SHARE = 0.45  # of the state's directions that take what the heads bring
BROUGHT_SIZE = 2.0  # of it, against the embeddings' root mean square
SIDE_SIZE = 4.0
OPEN_GATE = 6.0
SPARE_GATE = 2.0  # spread of the gates of spare units around an open one

RIDGE = 0.02  # times the mean square of each input
PLACE_RIDGE = 1e-3  # for directions that are there exactly
SKETCH_RIDGE = 5e-3
HEAD_ROWS = 2**14  # rows of the head that stand for all of them in the metric


@torch.no_grad()
def fit_first_layer(drafter: BlockDrafter, examples: Sequence[Example]) -> str:
    """Fit the first layer of a drafter whose other layers are the target's last ones.

    ``examples`` are batches with the target's features; a few hundred samples with many anchors are enough. Returns a
    line that says what was done.
    """
    _LayerFit(drafter, examples).run()
    return f"layers.0 fitted to the target's layer {drafter.conventions.target_layer_ids[passed_tap(drafter)]}"


@dataclass(frozen=True)
class _Rows:
    """The supervised slots of one example in front of the first layer.

    The states of all slots and their mask are made anew for each use: with many anchors they are larger than the
    target's features.
    """

    drafter: BlockDrafter
    batch: Batch
    around: Tensor  # [B, T, D] the context
    slots: objective.Rows
    passed: Tensor  # [B*T, D] the tap that the context passes on

    @property
    def arguments(self) -> BlockArguments:
        """What the first layer reads."""
        return self.drafter.arguments_around(self.batch, self.around)

    @property
    def tokens(self) -> Tensor:
        """The tokens [n] of the context."""
        return self.batch.input_ids[self.batch.segment_ids > 0]

    @property
    def context(self) -> Tensor:
        """The context without padding [n, D]."""
        return self.around[self.batch.segment_ids > 0].float()

    @property
    def state(self) -> Tensor:
        """The slot's own state [R, D]."""
        return self.drafter.row_inputs(self.batch).flatten(0, 1)[self.slots.index].float()

    @property
    def wanted(self) -> Tensor:
        """The target's state at the slot [R, D]."""
        return self.passed[self.slots.position].float()

    @property
    def kinds(self) -> tuple[Tensor, Tensor]:
        """Whether each row [R] is its block's slot 0, and whether it is another."""
        return self.slots.slot == 0, self.slots.slot > 0


class _LayerFit:
    """The first layer, its examples, and the steps of the fit in their order."""

    def __init__(self, drafter: BlockDrafter, examples: Sequence[Example]) -> None:
        self.drafter, self.layer = drafter, drafter.decoder_layers[0]
        self.width, self.device = drafter.fc.out_features, drafter.fc.weight.device
        self.tap = slice(passed_tap(drafter) * self.width, (passed_tap(drafter) + 1) * self.width)
        self.heads, self.groups = drafter.target.num_attention_heads, drafter.target.num_key_value_heads
        self.head_dim = drafter.target.head_dim
        self.jobs = [head % 3 for head in range(self.heads)]
        self.metric = root(logit_metric(drafter, drafter.norm.weight)).half
        self.parts = _parts(drafter.rope.inverse_frequencies.to(self.device), self.head_dim)
        tokens = torch.cat([batch.input_ids[batch.segment_ids > 0] for batch, _ in examples])
        self.sketches = _sketches(drafter, tokens, min(len(self.parts.sketch), int(SKETCH_SHARE * self.width)))
        self.layer.input_layernorm.weight.fill_(1.0)
        self._write_sketches(examples)
        self.examples = [self._rows(batch, features) for batch, features in examples]

    def run(self) -> None:
        self._place_queries_and_keys()
        self._fit_values()
        self._place_output()
        self._fit_mlp()

    def _write_sketches(self, examples: Sequence[Example]) -> None:
        """Let the context say which token each position holds."""
        size, width, fc = self.sketches.shape[1], self.width, self.drafter.fc
        fit = LeastSquares(fc.in_features, size, self.device)
        for batch, features in examples:
            real = batch.segment_ids > 0
            hidden = features.hidden[real].float()
            hidden = hidden * hidden[:, self.tap].square().mean(1, keepdim=True).rsqrt()
            fit.add_group(hidden, self.sketches[batch.input_ids[real]])
        quiet = quiet_directions(fit.moment[self.tap, self.tap], size)  # [D, s]
        others = torch.eye(width, device=self.device) - quiet @ quiet.t()
        fc.weight[:, self.tap] = others @ fc.weight[:, self.tap]
        fc.weight.add_(quiet @ fit.solve(SKETCH_RIDGE).t() * SKETCH_SIZE)
        scale = self.drafter.hidden_norm.weight
        for layer in self.drafter.decoder_layers[1:]:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.weight.copy_((linear.weight * scale) @ others / scale)

    def _rows(self, batch: Batch, features: Features) -> _Rows:
        return _Rows(
            drafter=self.drafter,
            batch=batch,
            around=self.drafter.context(features.hidden),
            slots=self.drafter.supervised_rows(batch),
            passed=features.hidden[..., self.tap].flatten(0, 1),
        )

    def _normed(self, rows: _Rows) -> Tensor:
        return self.layer.input_layernorm(rows.state).float()

    def _place_queries_and_keys(self) -> None:
        attention, parts = self.layer.self_attn, self.parts
        near, still = parts.near, parts.still
        sketches = self.sketches @ parts.sketch[: self.sketches.shape[1]]
        key = LeastSquares(self.width, self.head_dim, self.device)
        queries = [LeastSquares(self.width, self.head_dim, self.device) for _ in range(3)]
        for rows in self.examples:
            x = self._normed(rows)
            first, others = (x[kind] for kind in rows.kinds)
            anchors = sketches[rows.slots.previous[rows.kinds[0]]]
            key.add_group(rows.context, near - still + sketches[rows.tokens])
            key.add_group(first, still - near)
            key.add_group(others, -near)
            wanted = {
                NEAREST: (near - 0.5 * still, near - 0.5 * still),
                TOKEN: (anchors + SELF * still, still),
                SIDE: (near - 0.5 * still, -near),
            }
            for job, (of_first, of_others) in wanted.items():
                queries[job].add_group(first, of_first)
                queries[job].add_group(others, of_others)
        placed = [query.solve(PLACE_RIDGE).t() for query in queries]
        weights = {
            attention.q_proj: torch.cat([placed[job] for job in self.jobs]),
            attention.k_proj: key.solve(PLACE_RIDGE).t().repeat(self.groups, 1),
        }
        for linear, weight in weights.items():
            linear.weight.copy_(weight * (PROJECTION_RMS / weight.square().mean().sqrt()))
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_((SHARPNESS / self.head_dim**0.5) ** 0.5)  # scores are products over sqrt(Dh)

    def _fit_values(self) -> None:
        """Choose, for groups of heads with the same jobs, the inputs that matter most to what those jobs read."""
        size, present = self.heads // self.groups, sorted(set(self.jobs))
        fits = self._fits((len(present) + 1) * self.width, self._read_and_own)
        solutions, moments = [fit.solve(RIDGE) for fit in fits], [fit.moment for fit in fits]
        done_by = [tuple(sorted(set(self.jobs[group * size : (group + 1) * size]))) for group in range(self.groups)]
        weight = torch.empty(self.groups, self.head_dim, self.width, device=self.device)
        for jobs in set(done_by):
            groups = [group for group, done in enumerate(done_by) if done == jobs]
            spans = [slice(place * self.width, (place + 1) * self.width) for place in map(present.index, jobs)]
            moment = torch.stack([m[span, span] for m in moments for span in spans]).mean(0)
            solution = torch.cat([s[span] @ self.metric for s in solutions for span in spans], dim=1)
            leading = leading_inputs(solution, moment, len(groups) * self.head_dim)  # the best first
            weight[groups] = leading.t().reshape(self.head_dim, len(groups), self.width).transpose(0, 1)
        if SIDE in self.jobs:
            context, masks = torch.cat([rows.context for rows in self.examples]), self._mask_state()
            weight[self.jobs.index(SIDE) // size, -1] = separate(context, masks, ridge=1e-4)
        self.layer.self_attn.v_proj.weight.copy_(weight.flatten(0, 1))

    def _mask_state(self) -> Tensor:
        """Return the normed state [1, D] of a mask."""
        mask = torch.tensor([self.drafter.conventions.mask_token_id], device=self.device)
        return self.layer.input_layernorm(self.drafter.head.embed(mask).float())

    def _fits(self, inputs: int, read: Callable[[_Rows], Tensor]) -> list[LeastSquares]:
        """Return the regressions of what the states miss on ``read``, for slot 0 and for the others."""
        fits = [LeastSquares(inputs, self.width, self.device) for _ in range(2)]
        for rows in self.examples:
            x, missing = read(rows), rows.wanted - rows.state
            for fit, kind in zip(fits, rows.kinds, strict=True):
                fit.add(x[kind], missing[kind], rows.slots.weight[kind])
        return fits

    def _read_and_own(self, rows: _Rows) -> Tensor:
        """Return the inputs that a head of each job reads for each row, and the row's own, [R, (jobs + 1) * D]."""
        arguments, attention = rows.arguments, self.layer.self_attn
        x = self.layer.input_layernorm(arguments.x)
        joint = torch.cat((arguments.context, x), dim=1)
        cos, sin = (torch.cat(p, dim=-2) for p in zip(arguments.context_rotation, arguments.rotation, strict=True))
        heads = [self.jobs.index(job) for job in sorted(set(self.jobs))]
        queries = attention.queries(x, arguments.rotation)[:, heads]
        keys, _ = attention.keys_values(joint, (cos, sin))
        keys = keys[:, [head * self.groups // self.heads for head in heads]]
        read = attend(queries, keys, joint[:, None].expand(-1, len(heads), -1, -1), arguments.mask)  # [B, jobs, n, D]
        states = read.transpose(1, 2).flatten(0, 1)[rows.slots.index].flatten(1)
        return torch.cat((states.float(), self._normed(rows)), dim=1)

    def _brought(self, rows: _Rows) -> Tensor:
        """Return what the heads bring to each row, [R, H * Dh]."""
        arguments = rows.arguments
        normed = arguments._replace(x=self.layer.input_layernorm(arguments.x))
        mixed = self.layer.self_attn.mix(*normed, self.drafter.attention_backend)
        return mixed.flatten(0, 1)[rows.slots.index].float()

    def _place_output(self) -> None:
        """Put what matters most of the heads' channels where the anchors' embeddings say least."""
        output = self.layer.self_attn.o_proj
        channels = output.in_features
        fits = self._fits(channels + self.width, lambda rows: torch.cat((self._brought(rows), rows.state), dim=1))
        moment = torch.stack([fit.moment[:channels, :channels] for fit in fits]).mean(0)
        solution = torch.cat([fit.solve(RIDGE)[:channels] @ self.metric for fit in fits], dim=1)
        leading = leading_inputs(solution, moment, min(channels, int(QUIET_SHARE * self.width)))  # [H*Dh, rank]
        own = fits[0].moment[channels:, channels:]  # of the anchors' embeddings
        unit = own.diagonal().mean().sqrt()
        quiet = quiet_directions(own, leading.shape[1] + 1)
        self.side, quiet = quiet[:, 0], quiet[:, 1:]
        output.weight.copy_(quiet @ leading.t() * (BROUGHT_SIZE * unit))
        if SIDE in self.jobs:
            channel = (self.jobs.index(SIDE) + 1) * self.head_dim - 1
            output.weight[:, channel] = self.side * (SIDE_SIZE * unit)

    def _fit_mlp(self) -> None:
        layer, mlp = self.layer, self.layer.mlp
        squares = torch.stack([self._added(rows).square().mean(0) for rows in self.examples]).mean(0)
        size = squares.sqrt()  # [D]
        middle = size.median().clamp(min=1e-6)
        layer.post_attention_layernorm.weight.copy_(middle / size.clamp(min=1e-2 * float(middle)))
        self._open_gates()
        mlp.down_proj.weight.zero_()
        for kind, units in enumerate((slice(0, None, 2), slice(1, None, 2))):
            fit = LeastSquares(len(range(mlp.gate_proj.out_features)[units]), self.width, self.device)
            for rows in self.examples:
                here = rows.kinds[kind]
                state = self._added(rows)[here]
                x = layer.post_attention_layernorm(state)
                said = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
                missing = rows.wanted[here] - state - said @ mlp.down_proj.weight.t()
                fit.add(said[:, units], missing, rows.slots.weight[here])
            mlp.down_proj.weight[:, units] = fit.solve(RIDGE).t()

    def _added(self, rows: _Rows) -> Tensor:
        """Return the state of each row in front of the MLP, [R, D]."""
        return rows.state + self.layer.self_attn.o_proj(self._brought(rows))

    def _open_gates(self) -> None:
        """Let units answer to slot 0 and to the other slots in turn."""
        mlp, width = self.layer.mlp, self.width
        kinds: list[list[Tensor]] = [[], []]
        for rows in self.examples[:: max(1, len(self.examples) // 64)]:
            x = self.layer.post_attention_layernorm(self._added(rows))
            for states, kind in zip(kinds, rows.kinds, strict=True):
                states.append(x[kind])
        first, others = map(torch.cat, kinds)
        side = self.side / self.layer.post_attention_layernorm.weight
        if SIDE not in self.jobs:
            side = separate(first, others)
        side = side * (OPEN_GATE / (first @ side).mean())
        for number, sign in enumerate((1.0, -1.0)):
            mlp.gate_proj.weight[number::2] = sign * side
            mlp.up_proj.weight[number::2] = self._directions(number, len(mlp.up_proj.weight[number::2]))
        spare = mlp.gate_proj.weight[2 * width :]
        spare.add_(torch.randn_like(spare) * (SPARE_GATE / width**0.5))

    def _directions(self, kind: int, count: int) -> Tensor:
        """Return what ``count`` units read of the normed state, [count, D]: all of it, or what matters most."""
        width = self.width
        if count >= width:
            rotation = torch.linalg.qr(torch.randn(width, width, device=self.device)).Q
            return torch.cat((rotation, torch.randn(count - width, width, device=self.device) / width**0.5))
        fit = LeastSquares(width, width, self.device)
        for rows in self.examples:
            here = rows.kinds[kind]
            state = self._added(rows)[here]
            x = self.layer.post_attention_layernorm(state)
            fit.add(x, rows.wanted[here] - state, rows.slots.weight[here])
        return leading_inputs(fit.solve(RIDGE) @ self.metric, fit.moment, count, floor=1e-3).t()


@dataclass(frozen=True)
class _Parts:
    """Orthogonal directions in the space of a head, by what rotation does to products with them."""

    near: Tensor  # [Dh] the product falls with the distance
    still: Tensor  # [Dh] rotation spares it most
    sketch: Tensor  # [s, Dh] channels that turn little within SPAN positions


def _parts(frequencies: Tensor, dim: int) -> _Parts:
    """sum_i w_i cos(f_i d) is about exp(-d / RANGE) for weights w of a Cauchy density.

    The slower half of the pairs is left for the sketch where it turns slowly enough; the slowest is ``still``.
    """
    pairs, frequencies = frequencies.shape[0], frequencies.float()
    slow = frequencies < 1.0 / SPAN
    slow[: max(1, pairs // 2)] = False
    scaled = frequencies * RANGE
    weights = (scaled / (1.0 + scaled.square())).masked_fill(slow, 0.0)
    weights[-1] = 0.0 if pairs > 1 else weights[-1]
    near, still = torch.zeros(dim, device=weights.device), torch.zeros(dim, device=weights.device)
    near[:pairs] = (weights / weights.sum()).sqrt()
    still[-1 if 2 * pairs < dim else pairs - 1] = 1.0  # a channel that is not turned at all, where there is one
    slow[-1] = False
    places = slow.nonzero().flatten()
    return _Parts(near, still, torch.eye(dim, device=weights.device)[torch.cat((places, places + pairs))])


def _sketches(drafter: BlockDrafter, tokens: Tensor, size: int) -> Tensor:
    """Return a vector of length 1 for every token, [V, size]; those that ``tokens`` holds are nearly orthogonal."""
    head = drafter.head
    embedding = head.embed(torch.arange(head.embedding.shape[0], device=tokens.device)).float()
    seen = embedding[tokens.unique()]
    mean = seen.mean(0)
    whiten = root((seen - mean).t() @ (seen - mean) / len(seen), floor=SKETCH_FLOOR).inverse_half
    turn = torch.linalg.qr(torch.randn(embedding.shape[1], embedding.shape[1], device=tokens.device)).Q
    return functional.normalize((embedding - mean) @ whiten @ turn[:, :size], dim=1)


def logit_metric(drafter: BlockDrafter, scale: Tensor | None = None) -> Tensor:
    """Return the mean square of a logit's change as a form [D, D] on states, multiplied by ``scale`` first."""
    weight = drafter.head.weight
    rows = weight[:: max(1, weight.shape[0] // HEAD_ROWS)].float()
    rows = rows - rows.mean(0)  # what all logits share changes nothing
    if scale is not None:
        rows = rows * scale.float()
    return rows.t() @ rows / rows.shape[0]
