"""Cross-entropies, divergences and acceptance of many draft rows, value and gradient in one pass over chunks of rows.

The head is frozen, so the gradient with respect to the draft states needs nothing from later: it is formed while a
chunk's logits are at hand, and nothing of size [R, V] outlives its chunk. The loss must be one scalar for that,
``sum_r w_r (ce * CE_r + soft * S_r + l1 * L1_r + lk * LK_r + mix * M_r + reverse * R_r + jsd * J_r)``: its terms share
their denominator, which the caller divides by afterwards. S is the cross-entropy against the target's distribution,
KL(p || q) plus p's own entropy; R = KL(q || p) and J = (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, in nats.
With a = 1 - L1/2, the chance of acceptance, LK = -log a, and M = c KL(p || q) + (1 - c) L1/2 with c = exp(-eta * a), a
weight that is not differentiated: far from the target the divergence pulls, close to it the acceptance itself.

With q = softmax(z), p the target's distribution, y the label and s = sign(q - p):

    d CE / dz = q - onehot(y)     d S / dz = q <p, 1> - p     d L1 / dz = q * (s - <q, s>)     d LK = dL1 / (2 a)

    d R / dz = q * (log(q / p) - R)     d J / dz = q * (g - <q, g>) with g = log(q / m) / 2

So each row needs one factor for S and one for L1, and both are known when its acceptance is. R and J read log(p / q),
which is formed from logits and never from p or q: it stays finite and right where those underflow. With
s(x) = log(1 + exp x), log(q / m) = ln 2 - s(log(p / q)) and log(p / m) = ln 2 - s(log(q / p)), so that
J = ln 2 - (<q, s(log(p / q))> + <p, s(log(q / p))>) / 2.

A reduced draft vocabulary has Vd of the target's V tokens. p is the target's softmax over all V, of which the Vd are
taken; q is the draft's over the Vd. The L1 distance then also counts p's mass outside, which q does not change; S sums
over the Vd; a row whose label lies outside has no cross-entropy, and counts in the denominators all the same. R is
sum q log(q / p) over the Vd, at least -log of p's mass inside. J counts ln 2 / 2 for each unit of p's mass outside, as
its definition says where q = 0; the formula above already holds that. Whole rows of V exist for the target alone, once
for each position of a chunk; none where the sums over V are known.

D-PACE weighs a row by the cross-entropies of its whole block (``RowTask.pace``). Chunks then hold whole blocks, and the
weights are known before the gradient is formed; a target position that two chunks need is projected in both.

Three modes. ``exact`` forms both logits in fp32 (fp64 for fp64 states). ``common_mode`` multiplies in the precision of
the head's weights and forms the draft's logits as the target's plus (h_draft - h_target) W^T: the rounding errors of
the target's logits are then common to both distributions and cancel in q - p. ``bf16_logits`` rounds both to bf16, as
training code does that leaves the head's product in the precision of the states: it is there to be compared with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspec.losses.chunks import by_block, by_position
from deepspec.losses.products import add_project, back_project, finish, project
from deepspec.losses.rows import pace_weights
from deepspec.losses.task import BUFFERS, CHUNK_BYTES, WHOLE_BUFFERS, Parts

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.losses.chunks import Chunk, Plan
    from deepspec.losses.task import RowTask


class BlockLoss(NamedTuple):
    """What the pass over R rows returns; only ``total`` carries a gradient."""

    total: Tensor  # 0-d, the sum over the rows
    ce: Tensor  # [R] nats
    soft: Tensor  # [R] nats, zeros unless it or the mix has a weight
    l1: Tensor  # [R]
    agreement: Tensor  # [R] 1.0 where the target's most likely token is the draft's too
    reverse: Tensor  # [R] KL(q || p) in nats, zeros unless it has a weight
    jsd: Tensor  # [R] Jensen-Shannon divergence in nats, zeros unless it has a weight

    @property
    def acceptance(self) -> Tensor:
        """Chance [R] that a token drawn from the draft is accepted."""
        return 1.0 - 0.5 * self.l1


def block_loss(hidden: Tensor, task: RowTask, markov: Tensor | None = None, w2: Tensor | None = None) -> BlockLoss:
    """Score draft states ``hidden`` [R, D]; logits get ``markov`` [R, r] times ``w2`` [Vd, r] added when given.

    Gradients flow to ``hidden``, ``markov`` and ``w2``.
    """
    return BlockLoss(*_FusedRows.apply(hidden, markov, w2, task, torch.is_grad_enabled()))


class _FusedRows(torch.autograd.Function):
    """The pass itself; ``backward`` only scales the gradients that ``forward`` has formed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, markov: Tensor | None, w2: Tensor | None, task: RowTask, grad_enabled: bool
    ) -> tuple[Tensor, ...]:
        wanted = grad_enabled and any(ctx.needs_input_grad)
        scan = _Scan(hidden, markov, w2, task, with_grad=wanted)
        for chunk in scan.plan.chunks:
            scan.run(chunk)
        parts = Parts(*(part[scan.plan.inverse] for part in scan.parts))
        agreement = scan.agreement[scan.plan.inverse]
        ctx.gradients = scan.gradients() if wanted else (None, None, None)
        found = (parts.ce, parts.soft, parts.l1, agreement, parts.reverse, parts.jsd)
        ctx.mark_non_differentiable(*found)
        total = (scan.weights[scan.plan.inverse] * task.value(parts)).sum()
        return total, *found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        scaled = [None if g is None else g * scale.to(g.dtype) for g in ctx.gradients]
        return (*scaled, None, None)


class _Scan:
    """Rows in the order of their target positions, and the buffers that every chunk reuses."""

    def __init__(
        self, hidden: Tensor, markov: Tensor | None, w2: Tensor | None, task: RowTask, *, with_grad: bool
    ) -> None:
        self.task, self.with_grad = task, with_grad
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.plan = self._plan(hidden.device)
        order, positions = self.plan.order, self.plan.positions
        self.hidden = hidden.detach()[order]  # [R, D]
        self.target_hidden = task.target_hidden.detach()[positions]  # [U', D]
        self.head, self.vocabulary = task.draft_head, task.vocabulary
        self.labels = task.labels[order]  # draft ids
        self.sayable = torch.ones(order.shape, device=order.device, dtype=self.wide)  # [R] 0 where the label is outside
        if self.vocabulary is not None:
            index = self.vocabulary.index[self.labels]
            self.labels, self.sayable = index.clamp(min=0), (index >= 0).to(self.wide)
        self.log_sum = None if task.target_log_sum is None else task.target_log_sum[positions].to(self.wide)
        self.target_top = None if task.target_top is None else task.target_top[positions]
        self.weights = task.weights[order].to(self.wide)
        self.source = (hidden, markov, w2)
        self.markov = None if markov is None else markov.detach()[order].to(self.wide)
        self.w2 = None if w2 is None else w2.detach()
        self._allocate()

    def _plan(self, device: torch.device) -> Plan:
        task = self.task
        row_bytes = task.row_elements * (8 if self.wide == torch.float64 else 4)
        chunk_rows = task.chunk_rows or max(1, CHUNK_BYTES.get(device.type, 2**28) // row_bytes)
        if task.pace is None:
            return by_position(task.target_index, chunk_rows)
        return by_block(task.target_index, task.pace.block, len(task.target_hidden), chunk_rows)

    def _allocate(self) -> None:
        device, rows = self.hidden.device, self.hidden.shape[0]
        shape = (max((_size(chunk.rows) for chunk in self.plan.chunks), default=0), self.head.vocab_size)
        self.buffers = [torch.empty(shape, device=device, dtype=self.wide) for _ in range(self.task.num_buffers)]
        if self.task.needs_whole_rows:
            shape = (max((_size(chunk.positions) for chunk in self.plan.chunks), default=0), self.task.head.vocab_size)
            self.whole = [torch.empty(shape, device=device, dtype=self.wide) for _ in range(WHOLE_BUFFERS)]
        self.parts = Parts(*(torch.zeros(rows, device=device, dtype=self.wide) for _ in Parts._fields))
        self.agreement = torch.zeros(rows, device=device, dtype=self.wide)
        if not self.with_grad:
            return
        self.grad_hidden = torch.zeros(self.hidden.shape, device=device, dtype=self.wide)
        if self.markov is not None and self.w2 is not None:
            self.grad_markov, self.grad_w2 = torch.zeros_like(self.markov), torch.zeros_like(self.w2, dtype=self.wide)

    def run(self, chunk: Chunk) -> None:
        """Score the rows of a chunk."""
        parts = self.parts
        rows, judge = chunk.rows, self.plan.judge[chunk.rows] - chunk.positions.start  # [n]
        x, y, z = (buffer[: len(judge)] for buffer in self.buffers[:BUFFERS])
        used = _size(chunk.positions)
        target_logits = (self.whole[0] if self.task.needs_whole_rows else x)[:used]  # [u, V or Vd]
        slope = self._logits(chunk, judge, z, target_logits)
        p, target_top, outside, target_log_sum = self._target(target_logits, chunk.positions, y[:used])
        top, label_logit = z.amax(-1), z.gather(1, self.labels[rows, None]).squeeze(1)
        self.agreement[rows] = self._agrees(z, top, target_top[judge])
        ratio = self._logit_difference(target_logits, x[:used], judge, z)  # before q takes the target's place
        q = torch.softmax(z, -1, out=x)
        log_sum = top - q.amax(-1).log()  # log sum exp z = max z - log max q
        parts.ce[rows] = (log_sum - label_logit) * self.sayable[rows]
        self._pace(chunk)
        excess = None if outside is None else -outside[judge, None]  # <p, 1> - 1
        if self.task.uses_soft:
            mass = 1.0 if excess is None else 1.0 + excess[:, 0]
            parts.soft[rows] = log_sum * mass - self._expected(p, judge, z)
        if self.task.mix:
            parts.entropy[rows] = torch.special.entr(p, out=self.buffers[BUFFERS][: len(p)]).sum(-1)[judge]
        d = torch.index_select(p, 0, judge, out=z)
        if ratio is not None and target_log_sum is not None:
            ratio.add_((log_sum - target_log_sum[judge])[:, None])  # log(p / q)
            ratio = self._divergences(rows, q, d, ratio, y)
        d.sub_(q)  # p - q
        parts.l1[rows] = torch.abs(d, out=y).sum(-1)  # sums are pairwise; a vector norm loses digits over a large V
        if outside is not None:
            parts.l1[rows] += outside[judge]
        if self.with_grad:
            self._gradient(rows, q, torch.sign(d, out=y).mul_(q), d, excess, slope, ratio)

    def _pace(self, chunk: Chunk) -> None:
        """Let the rows of whole blocks weigh as D-PACE says, when it is asked for."""
        pace, block, rows = self.task.pace, self.plan.block, chunk.rows
        if pace is None or block is None:
            return
        place = (block[rows] - chunk.blocks.start, pace.slot[self.plan.order[rows]])
        chance = self.parts.ce.new_zeros(_size(chunk.blocks), pace.gamma)
        chance[place] = torch.exp(-self.parts.ce[rows]) * self.sayable[rows]
        mask = torch.zeros_like(chance, dtype=torch.bool)
        mask[place] = True
        self.weights[rows] *= pace_weights(chance, mask, pace.smoothing)[place]

    def _expected(self, p: Tensor, judge: Tensor, z: Tensor) -> Tensor:
        """Return <p, z> [n] over the draft's vocabulary."""
        chosen = torch.index_select(p, 0, judge, out=self.buffers[BUFFERS][: len(z)])
        return chosen.mul_(z).sum(-1)

    def _logit_difference(self, logits: Tensor, place: Tensor, judge: Tensor, z: Tensor) -> Tensor | None:
        """Return the target's logits less the draft's [n, Vd] where log(p / q) is wanted; ``place`` [u, Vd] is free.

        The difference comes before both sums over the vocabulary: what the two have in common cancels exactly.
        """
        if not self.task.uses_ratio:
            return None
        if self.vocabulary is not None and self.task.needs_whole_rows:
            logits = torch.index_select(logits, 1, self.vocabulary.ids, out=place)
        return torch.index_select(logits, 0, judge, out=self.buffers[-1][: len(z)]).sub_(z)

    def _divergences(self, rows: slice, q: Tensor, p: Tensor, ratio: Tensor, y: Tensor) -> Tensor:
        """Note KL(q || p) and the Jensen-Shannon divergence of rows from ``ratio`` = log(p / q) [n, Vd].

        Returns -q times what pulls at each token, d loss / dq but for what all tokens share, in the place of ``ratio``.
        """
        task = self.task
        if task.jsd:
            softplus = torch.logaddexp(ratio, ratio.new_zeros(()), out=y)  # functional.softplus cuts off at 20
            of_p = torch.sub(softplus, ratio, out=self.buffers[BUFFERS][: len(y)]).mul_(p)
            self.parts.jsd[rows] = math.log(2.0) - 0.5 * (of_p.sum(-1) + softplus.mul_(q).sum(-1))
        ratio.mul_(q)
        if task.reverse:
            self.parts.reverse[rows] = -ratio.sum(-1)
        ratio.mul_(task.reverse)
        return ratio.add_(y, alpha=0.5 * task.jsd) if task.jsd else ratio

    def _target(self, logits: Tensor, targets: slice, p: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Fill ``p`` [u, Vd] from the target's ``logits`` [u, V], or [u, Vd] where the sums over V are known.

        Returns p, the draft id of its most likely token [u] (negative where it has none), its mass outside [u], and
        for log(p / q) the log of what exp(logits) is to be divided by [u].
        """
        if self.vocabulary is None:
            torch.softmax(logits, -1, out=p)
            return p, p.argmax(-1), None, self._log_sum(logits, p)
        if self.log_sum is not None and self.target_top is not None:
            torch.exp(logits.sub_(self.log_sum[targets, None]), out=p)
            outside = (1.0 - p.sum(-1)).clamp(min=0.0)
            return p, self.vocabulary.index[self.target_top[targets]], outside, torch.zeros_like(outside)
        whole = torch.softmax(logits, -1, out=self.whole[1][: len(logits)])
        torch.index_select(whole, 1, self.vocabulary.ids, out=p)
        outside = (whole.sum(-1) - p.sum(-1)).clamp(min=0.0)
        return p, self.vocabulary.index[whole.argmax(-1)], outside, self._log_sum(logits, whole)

    def _log_sum(self, logits: Tensor, softmax: Tensor) -> Tensor | None:
        """Return log sum exp [u] of ``logits`` [u, V] whose softmax is known, where log(p / q) is wanted."""
        return logits.amax(-1) - softmax.amax(-1).log() if self.task.uses_ratio else None

    def _agrees(self, z: Tensor, top: Tensor, target_top: Tensor) -> Tensor:
        """Return [n], 1.0 where the target's most likely token has the draft's largest logit ``top`` [n]."""
        same = z.gather(1, target_top.clamp(min=0)[:, None]).squeeze(1) >= top
        return (same & (target_top >= 0)).to(self.wide)

    def _logits(self, chunk: Chunk, judge: Tensor, z: Tensor, target_logits: Tensor) -> Tensor | None:
        """Fill ``z`` [n, Vd] with the draft's and ``target_logits`` [u, V] with the target's logits.

        Returns the slope of the head's soft-cap at z [n, Vd] when it has one.
        """
        rows, targets, head, judges = chunk.rows, chunk.positions, self.head, self.task.judge_head
        project(self.target_hidden[targets], judges.weight, target_logits)
        if self.task.mode != "common_mode":
            project(self.hidden[rows], head.weight, z)
        else:
            difference = self.hidden[rows].to(self.wide) - self.target_hidden[targets].to(self.wide)[judge]
            project(difference, head.weight, z, in_weight_precision=True)
            common = target_logits
            if self.vocabulary is not None and self.task.needs_whole_rows:
                common = target_logits.index_select(1, self.vocabulary.ids)
            z.add_(common[judge])
        finish(target_logits, judges, with_slope=False)
        slope = finish(z, head, with_slope=self.with_grad)
        if self.markov is not None and self.w2 is not None:
            add_project(self.markov[rows], self.w2, z)
        if self.task.mode == "bf16_logits":
            for logits in (z, target_logits):
                logits.copy_(logits.to(torch.bfloat16))
        return slope

    def _gradient(
        self,
        rows: slice,
        q: Tensor,
        grad: Tensor,
        difference: Tensor,
        excess: Tensor | None,
        slope: Tensor | None,
        pull: Tensor | None,
    ) -> None:
        """Turn ``grad`` = q * sign(p - q) [n, Vd] into d loss / dz and push it through head and Markov matrix.

        ``difference`` is p - q; ``excess`` [n, 1] is <p, 1> - 1 where that is not zero; ``pull`` is what
        ``_divergences`` returns.
        """
        task, head, weights = self.task, self.head, self.weights[rows, None]
        ce = task.ce * self.sayable[rows, None]
        mean = grad.sum(-1, keepdim=True)  # <q, sign(p - q)>
        of_soft, of_l1 = (factor[:, None] for factor in task.factors(self.parts.l1[rows]))
        share = ce + of_l1 * mean
        grad.mul_(-of_l1 * weights)
        if task.uses_soft:
            share = share if excess is None else share + of_soft * excess
            grad.sub_(difference.mul_(of_soft * weights))
        if pull is not None:
            share = share + pull.sum(-1, keepdim=True)
            grad.sub_(pull.mul_(weights))
        grad.add_(q.mul_(weights * share))
        grad.scatter_add_(1, self.labels[rows, None], -ce * weights)
        if self.markov is not None and self.w2 is not None:
            back_project(grad, self.w2, self.grad_markov[rows])
            self.grad_w2.addmm_(grad.t(), self.markov[rows])
        if slope is not None:
            grad.mul_(slope)
        low = task.mode == "common_mode" or (grad.is_cuda and self.hidden.dtype == head.weight.dtype)
        back_project(grad, head.weight, self.grad_hidden[rows], in_weight_precision=low)
        if head.logit_scale != 1.0:
            self.grad_hidden[rows].mul_(head.logit_scale)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the caller's order of rows and in the precision of the inputs."""
        hidden, markov, w2 = self.source
        del self.buffers, self.hidden, self.target_hidden  # their memory serves the copies
        grad_hidden = self.grad_hidden[self.plan.inverse].to(hidden.dtype)
        if markov is None or w2 is None:
            return grad_hidden, None, None
        return grad_hidden, self.grad_markov[self.plan.inverse].to(markov.dtype), self.grad_w2.to(w2.dtype)


def _size(part: slice) -> int:
    return int(part.stop - part.start)
