"""Oracle of routing, and the formulas around it: z-loss and the step of the balancing bias. All of it is fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from maniple.models.card import MoE

# DeepSeek-V3's own code guards the sum of sigmoid scores with it
_SUM_FLOOR = 1e-20


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its experts. The fields are those of a model card (`maniple.models.card.Router`)."""

    num_experts: int
    topk: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_before_topk: bool = True
    renormalize: bool = True
    num_groups: int = 1
    group_topk: int = 1
    group_score: Literal["max", "sum_top2"] = "max"
    route_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.num_groups} groups")
        group = self.num_experts // self.num_groups
        if not 1 <= self.group_topk <= self.num_groups or not 1 <= self.topk <= self.group_topk * group:
            raise ValueError(
                f"no top {self.topk} of {self.group_topk} groups, where {self.num_groups} have {group} experts"
            )
        if self.group_score == "sum_top2" and self.num_groups > 1 and group < 2:
            raise ValueError("group_score sum_top2 needs at least two experts a group")

    @classmethod
    def from_card(cls, moe: MoE) -> RouterSpec:
        """The router of a model card's `moe` section."""
        router = moe.router
        return cls(
            num_experts=moe.num_experts,
            topk=moe.topk,
            score=router.score,
            score_before_topk=router.score_before_topk,
            renormalize=router.renormalize,
            num_groups=router.num_groups,
            group_topk=router.group_topk,
            group_score=router.group_score,
            route_scale=router.route_scale,
        )


@dataclass(frozen=True)
class Routing:
    """What `route` decides. Gradients flow through `probs_TK` and `scores_TE`."""

    ids_TK: torch.Tensor  # int64, in [0, E), distinct within a token, by falling (biased) score
    probs_TK: torch.Tensor  # fp32, weight of each chosen expert's output
    scores_TE: torch.Tensor  # fp32, over all experts, sum 1 for each token: what balance losses use

    def counts(self, valid_T: torch.Tensor | None = None) -> torch.Tensor:
        """int64 `[E]`: tokens that chose each expert, exactly; only those with `valid_T` (bool) where it is given."""
        return self.sequence_counts(1, valid_T)[0]

    def sequence_counts(self, sequences: int, valid_T: torch.Tensor | None = None) -> torch.Tensor:
        """int64 `[B, E]`: `counts` of each of B sequences; token t is of sequence `t % B` (`[S, B]` flattened)."""
        tokens, experts = self.scores_TE.shape
        sequence_T = torch.arange(tokens, device=self.ids_TK.device) % sequences
        bins_TK = self.ids_TK + experts * sequence_T[:, None]
        ones_TK = torch.ones_like(bins_TK) if valid_T is None else valid_T[:, None].to(torch.int64).expand_as(bins_TK)
        flat = torch.zeros(sequences * experts, dtype=torch.int64, device=self.ids_TK.device)
        return flat.scatter_add_(0, bins_TK.flatten(), ones_TK.flatten()).view(sequences, experts)


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    ids_TK: torch.Tensor | None = None,
) -> Routing:
    """Chooses K experts for each token. Any float logits; fp32 bias `[E]` or None.

    1. Logits are cast to fp32 before anything else.
    2. Score: softmax over the experts, or sigmoid. With `score_before_topk` False the logits themselves take the
       score's place in steps 3 to 5.
    3. Selection score = score + bias. The bias enters selection (of groups and of experts) and nothing else.
    4. Groups, if there are several: experts are cut into `num_groups` equal runs; a group scores the maximum, or the
       sum of the two largest, of its selection scores; the `group_topk` best groups stay. An expert of another group is
       never chosen, however low the selection scores of those that stay: also where they are negative or -inf.
    5. The K experts with the highest selection scores, in falling order. Ties, of groups and of experts, go to the
       lowest id. -inf is the lowest score; NaN counts as the highest.
    6. Weight = score of the chosen (without bias). With `score_before_topk` False: softmax over the K chosen logits, or
       their sigmoid.
    7. `renormalize` divides a token's weights by their sum + 1e-20; then all are multiplied by `route_scale`.

    With `ids_TK` (int64 `[T, K]`) steps 3 to 5 are left out: the choice is one that was made before.

    `scores_TE` is softmax over all experts, or sigmoid divided by its sum + 1e-20, whatever `score_before_topk` says.
    A token with a NaN logit has NaN weights (softmax; where it chose the NaN, sigmoid) and ids in range. At least one
    logit must be finite for a softmax without NaN. No step waits for the device.
    """
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.softmax(-1) if spec.score == "softmax" else logits_TE.sigmoid()
    basis_TE = scores_TE if spec.score_before_topk else logits_TE
    if ids_TK is None:
        ids_TK = _choose(basis_TE.detach() if bias_E is None else basis_TE.detach() + bias_E, spec)
    chosen_TK = basis_TE.gather(1, ids_TK)
    if not spec.score_before_topk:
        chosen_TK = chosen_TK.softmax(-1) if spec.score == "softmax" else chosen_TK.sigmoid()
    if spec.renormalize and (spec.score_before_topk or spec.score == "sigmoid"):
        chosen_TK = chosen_TK / (chosen_TK.sum(-1, keepdim=True) + _SUM_FLOOR)
    if spec.score == "sigmoid":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + _SUM_FLOOR)
    return Routing(ids_TK=ids_TK, probs_TK=chosen_TK * spec.route_scale, scores_TE=scores_TE)


@torch.no_grad()
def _choose(selection_TE: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Steps 4 and 5. Experts of dropped groups are left out, not masked, so that no score can bring them back."""
    if spec.num_groups == 1:
        return _best(selection_TE, spec.topk)
    tokens, group = selection_TE.shape[0], spec.num_experts // spec.num_groups
    grouped = selection_TE.view(tokens, spec.num_groups, group)
    group_scores = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    # rising group ids keep the candidates in the order of their expert ids, which ties need
    kept = _best(group_scores, spec.group_topk).sort(-1).values
    candidates = (kept[:, :, None] * group + torch.arange(group, device=kept.device)).flatten(1)
    return candidates.gather(1, _best(selection_TE.gather(1, candidates), spec.topk))


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest of each row, ties to the lowest index: `torch.topk` does not promise that."""
    one_nan = torch.where(scores.isnan(), torch.nan, scores)  # some GPU sorts take the sign of a NaN for its rank
    # a copy: a view keeps the indices of all experts for as long as the choice is kept
    return one_nan.sort(dim=-1, descending=True, stable=True).indices[:, :count].clone()


def z_loss(logits_TE: torch.Tensor, valid_T: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over (valid) tokens of `logsumexp(logits)²` (ST-MoE, Zoph et al., 2022); fp32 scalar, 0 without tokens."""
    logits_TE = logits_TE.float()
    if valid_T is None:
        return logits_TE.logsumexp(-1).square().sum() / max(1, logits_TE.shape[0])
    squares_T = logits_TE.masked_fill(~valid_T[:, None], 0).logsumexp(-1).square() * valid_T
    return squares_T.sum() / valid_T.sum().clamp(min=1)


@torch.no_grad()
def bias_update(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> torch.Tensor:
    """`bias + rate * sign(mean(counts) - counts)` (Wang et al., 2024, aux-loss-free balancing); a new fp32 `[E]`.

    counts_E: int64, over the whole batch. The comparison with the mean is one of integers: no count is rounded.
    """
    if bias_E.dtype != torch.float32 or counts_E.dtype != torch.int64:
        raise ValueError(f"bias_update needs an fp32 bias and int64 counts, not {bias_E.dtype} and {counts_E.dtype}")
    return bias_E + rate * torch.sign(counts_E.sum() - counts_E.numel() * counts_E).float()
