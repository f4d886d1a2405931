"""The MoE layer in Megatron-Core's slot: its forward order and schedule hooks, with Maniple's router and dispatchers.

`ManipleMoELayer` is a `MoELayer`, since upstream asks `isinstance(layer.mlp, MoELayer)`, and passes `(probs_TK,
ids_TK)` where upstream passes dense `[T, E]` probabilities and a map. Shapes: T tokens on this rank, D hidden,
E experts, K chosen a token, S slots of the expert-sorted buffer, G experts on this rank.
"""

from __future__ import annotations

import contextlib
from collections import deque

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from maniple.kernels.routing import RouterSpec, Routing, route, router_logits, z_loss
from maniple.moe.bounded import BoundedDispatcher
from maniple.moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from maniple.moe.pages import ActivationPages
from maniple.moe.room import Room
from maniple.moe.router import load_balance_loss

# upstream's name of a balance loss: (ours, and the name under which Megatron-LM's log reports it)
_AUX_LOSSES = {
    "seq_aux_loss": ("sequence", "seq_load_balancing_loss"),
    "aux_loss": ("micro_batch", "load_balancing_loss"),
    "global_aux_loss": ("global_batch", "global_load_balancing_loss"),
}


class ManipleRouter(TopKRouter):
    """Router whose statistics come from the very ids that dispatch uses.

    Buffers: `expert_bias` fp32 `[E]` (persistent, if the model has one); `local_tokens_per_expert` int64 `[E]`, counted
    once a training forward and zeroed after each step; `running_counts` int64 `[E]`: those of all micro-batches and
    ranks so far, for the global balance loss; `loss_sums` fp32 `[2]`: aux and z loss summed over micro-batches. None
    of them leaves its dtype when the model is cast to bf16.
    """

    def __init__(self, config, pg_collection=None, is_mtp_layer: bool = False) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.spec = router_spec(config)
        self.first_choices: deque[torch.Tensor] = deque()  # ids_TK of the micro-batches that will be recomputed
        device = torch.cuda.current_device()
        counts_E = torch.zeros(config.num_moe_experts, dtype=torch.int64, device=device)
        # TopKRouter has made an fp32 one where there is a bias; its sums are inexact past 2^24
        self.__dict__.pop("local_tokens_per_expert", None)
        self._buffers.pop("local_tokens_per_expert", None)
        self.register_buffer("local_tokens_per_expert", counts_E, persistent=False)
        self.register_buffer("running_counts", torch.zeros_like(counts_E), persistent=False)
        self.register_buffer("loss_sums", torch.zeros(2, dtype=torch.float32, device=device), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Casting the model (Float16Module) must not round the bias or the sums; moving it must move them."""
        kept = {
            name: self._buffers[name] for name in ("expert_bias", "loss_sums") if self._buffers.get(name) is not None
        }
        super()._apply(fn, recurse)
        for name, before in kept.items():
            self._buffers[name] = before.to(self._buffers[name].device)
        return self

    def reset_global_aux_loss_tracker(self) -> None:
        """Called by Megatron-Core's `finalize_model_grads` at the end of a global batch."""
        self.running_counts.zero_()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """fp32 logits `[S, B, E]` of `[S, B, D]`. Upstream's products of fp32 copies pass tensor cores by."""
        if self.config.moe_router_dtype != "fp32":
            return super().gating(input)
        logits_TE = router_logits(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return logits_TE.view(*input.shape[:-1], -1)

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """logits `[S, B, E]` -> (probs fp32 `[T, K]`, ids int64 `[T, K]`); `padding_mask` `[S, B]`: True at padding."""
        length, batch = logits.shape[:2]
        logits_TE = logits.reshape(length * batch, -1).float()
        valid_T = None if padding_mask is None else ~padding_mask.reshape(-1)
        learning = self.training and torch.is_grad_enabled()
        # tokens that count of the sequences that this rank holds a part of
        tokens = self._tokens(valid_T, length * batch, self.tp_cp_group) if learning else 0
        if learning and self.config.moe_z_loss_coeff:
            loss = z_loss(logits_TE, valid_T)
            self._report("z_loss", loss, avg_group=self.tp_dp_cp_group)
            here = length * batch if valid_T is None else valid_T.sum()
            loss = loss * here / tokens  # this rank's share of the mean
            self.loss_sums[1] += loss.detach()
            logits_TE = self._attach(logits_TE, loss * self.config.moe_z_loss_coeff, tokens)
        routing = self._route(logits_TE, learning)
        probs_TK = routing.probs_TK
        if learning:
            with torch.no_grad():
                self.local_tokens_per_expert += routing.counts(valid_T)
            for kind, reported_as, coefficient in self._aux_losses():
                whole = kind == "global_batch"
                loss = load_balance_loss(
                    routing,
                    kind=kind,
                    sequence_length=length,
                    batch_size=batch,
                    valid_T=valid_T,
                    group=self.tp_dp_cp_group if whole else self.tp_cp_group,
                    running_counts_E=self.running_counts if whole else None,
                )
                weight = tokens
                if whole:
                    # shares of data-parallel ranks add up to the loss, but gradients are averaged over them
                    replicas = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
                    loss = loss * replicas
                    weight = self._tokens(valid_T, length * batch, self.tp_dp_cp_group) / replicas
                self.loss_sums[0] += loss.detach()
                self._report(reported_as, loss, reduce_group=self.tp_cp_group)
                probs_TK = self._attach(probs_TK, loss * coefficient, weight)
        return probs_TK, routing.ids_TK

    def _route(self, logits_TE: torch.Tensor, learning: bool) -> Routing:
        """Under recomputation the choice of the first pass is kept and taken again in the second, in which a logit may
        come out differently (products of other shapes round otherwise) and a near-tie flip. Micro-batches pass backward
        in the order in which they passed forward, in every schedule."""
        if not (self.training and is_checkpointing()):
            return route(logits_TE, self.spec, self.expert_bias)
        if learning:
            return route(logits_TE, self.spec, self.expert_bias, ids_TK=self.first_choices.popleft())
        routing = route(logits_TE, self.spec, self.expert_bias)
        self.first_choices.append(routing.ids_TK)
        return routing

    def _aux_losses(self):
        for name, (kind, reported_as) in _AUX_LOSSES.items():
            if (coefficient := self.get_aux_loss_coeff(name)) > 0:
                yield kind, reported_as, coefficient

    def _report(self, name: str, loss: torch.Tensor, **groups) -> None:
        """Gives a loss to Megatron-LM's log, where that is what trains; Maniple's own trainer reads `loss_sums`."""
        if hasattr(self.config, "maniple_moe") or self.layer_number is None:
            return
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        number = self.layer_number + (self.config.num_layers if self.is_mtp_layer else 0)
        get_moe_metrics_tracker().record(name, loss, number, layers, **groups)

    def _attach(self, carrier: torch.Tensor, loss: torch.Tensor, tokens: torch.Tensor | float) -> torch.Tensor:
        """Adds `loss`'s gradient, this rank's share, where `carrier`'s gradient passes. With per-token loss upstream
        divides every gradient by the global batch's tokens, so the loss is multiplied by this micro-batch's `tokens`
        (router.py, `attach_and_log_load_balancing_loss`): what is left is the mean over micro-batches and data-parallel
        ranks. Upstream takes each rank's own number, which padding makes unequal."""
        return MoEAuxLossAutoScaler.apply(carrier, loss * tokens if self.calculate_per_token_loss else loss)

    @staticmethod
    @torch.no_grad()
    def _tokens(valid_T: torch.Tensor | None, here: int, group) -> torch.Tensor | int:
        """Tokens that count over the ranks of `group`, at least 1; `here`: tokens on this rank, as on each other."""
        if valid_T is None:
            return max(1, here * group.size())
        tokens = valid_T.sum()
        if group.size() > 1:
            torch.distributed.all_reduce(tokens, group=group)
        return tokens.clamp(min=1)


class EngineDispatcher(MoETokenDispatcher):
    """Megatron-Core's six stages over one of Maniple's dispatchers, which keeps its metadata in a handle of its own."""

    def __init__(self, config, pg_collection, dispatcher: Dispatcher) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.dispatcher = dispatcher
        self.handle = None
        self.shape: torch.Size | None = None

    def dispatch_preprocess(self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        self.shape = tokens.shape
        x_TD = tokens.reshape(-1, tokens.shape[-1])
        rows, probs, self.handle = self.dispatcher.dispatch_preprocess(x_TD, routing_map, probs)
        return rows, probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        return self.dispatcher.token_dispatch(hidden_states, probs, self.handle)

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        rows_SD, probs_S, ends_G = self.dispatcher.dispatch_postprocess(hidden_states, probs, self.handle)
        return rows_SD, ends_G, probs_S

    def combine_preprocess(self, hidden_states: torch.Tensor):
        return self.dispatcher.combine_preprocess(hidden_states, self.handle)

    def token_combine(self, hidden_states: torch.Tensor):
        return self.dispatcher.token_combine(hidden_states, self.handle)

    def combine_postprocess(self, hidden_states: torch.Tensor):
        out_TD = self.dispatcher.combine_postprocess(hidden_states, self.handle)
        return out_TD.view(self.shape)


class ManipleMoELayer(MoELayer):
    """Upstream's MoE layer with the dispatcher that the job asks for. Raises ValueError for what it cannot run."""

    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None, is_mtp_layer=False, name=None):
        if config.moe_shared_expert_overlap or config.moe_expert_capacity_factor is not None:
            raise ValueError("Maniple's MoE layer has neither shared-expert overlap nor token dropping")
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            pg_collection=pg_collection,
            is_mtp_layer=is_mtp_layer,
            name=name,
        )
        factor = config.maniple_moe.buffer_factor if hasattr(config, "maniple_moe") else None
        self.room = None if factor is None else Room(factor)  # of the buffers; None: they have the sizes needed
        self.pages: ActivationPages | None = None  # set by `share_pages`, one for all layers
        self.exact = self._dispatcher(pg_collection)
        self.training_dispatcher = self.exact if self.room is None else self._bounded(pg_collection, self.room)
        self.token_dispatcher = EngineDispatcher(config, pg_collection, self.training_dispatcher)

    def train(self, mode: bool = True):
        """Evaluation has exact sizes: nothing there runs a pass again whose rows did not fit."""
        if hasattr(self, "exact"):
            self.token_dispatcher.dispatcher = self.training_dispatcher if mode else self.exact
        return super().train(mode)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """As upstream's, and hands the experts their group sizes where the dispatcher has read them on the host."""
        rows_SD, ends_G, probs_S = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        splits_G = getattr(self.token_dispatcher.handle, "splits_G", None)
        with self._keeping(rows_SD, ends_G):
            out_SD, _ = self.experts(rows_SD, ends_G, probs_S, splits_G=splits_G)
        return self.token_dispatcher.combine_preprocess(out_SD), None

    def _keeping(self, rows_SD: torch.Tensor, ends_G: torch.Tensor):
        if self.pages is None or self.room is None or not self.training:
            return contextlib.nullcontext()
        slots = rows_SD.shape[0]
        return self.pages.keeping(ends_G, slots, slots * self.room.balanced // max(self.room.rows, 1))

    def _dispatcher(self, groups) -> Dispatcher:
        asked = self.config.maniple_moe.dispatcher if hasattr(self.config, "maniple_moe") else "auto"
        spread = groups.ep.size() * groups.expt_tp.size() > 1
        if asked == "local" and spread:
            raise ValueError("dispatcher local needs all experts on each rank: use all_to_all, or EP x ETP = 1")
        experts = self.config.num_moe_experts
        static = getattr(self.config, "maniple_static_splits", False)  # a dry run has no values to count
        if asked == "all_to_all" or spread:
            etp_group = groups.expt_tp if groups.expt_tp.size() > 1 else None
            return AllToAllDispatcher(experts, groups.ep, etp_group=etp_group, static_splits=static)
        return LocalDispatcher(experts)

    def _bounded(self, groups, room: Room) -> Dispatcher:
        etp_group = groups.expt_tp if groups.expt_tp.size() > 1 else None
        return BoundedDispatcher(self.config.num_moe_experts, groups.ep, etp_group=etp_group, room=room)


def moe_layers(chunks: list[torch.nn.Module]) -> list[ManipleMoELayer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, ManipleMoELayer)]


def share_pages(chunks: list[torch.nn.Module], factor: float | None) -> None:
    """Gives all MoE layers of this rank's chunks one pool of pages; None: none."""
    pages = None if factor is None else ActivationPages(factor)
    for layer in moe_layers(chunks):
        layer.pages = pages


def router_spec(config) -> RouterSpec:
    """The router of a config: the card's where Maniple made the config, else what Megatron-LM's arguments mean."""
    if hasattr(config, "maniple_router"):
        return config.maniple_router
    groups = config.moe_router_num_groups or 1
    group_topk = config.moe_router_group_topk or 1
    # moe_utils.group_limited_topk scores a group by the sum of its best topk / group_topk experts
    per_group = config.moe_router_topk // group_topk if groups > 1 else 1
    if config.moe_router_score_function not in ("softmax", "sigmoid") or per_group not in (1, 2):
        raise ValueError(
            f"no router for score {config.moe_router_score_function} with topk {config.moe_router_topk} "
            f"over {group_topk} groups"
        )
    sigmoid = config.moe_router_score_function == "sigmoid"
    return RouterSpec(
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        score=config.moe_router_score_function,
        # softmax over the chosen logits is softmax over all of them, renormalised
        renormalize=(config.moe_router_topk > 1) if sigmoid else not config.moe_router_pre_softmax,
        num_groups=groups,
        group_topk=group_topk,
        group_score="sum_top2" if per_group == 2 else "max",
        route_scale=config.moe_router_topk_scaling_factor or 1.0,
    )
