"""Megatron-Core's GPTModel and multi-token prediction (MTP), so that no cut of a batch changes what is learnt.

MTP depth k (from 1) looks at a position's hidden state and at the k tokens after it, and is asked for the token after
those. Its loss is DeepSeek-V3's (2024, eq. 24 and 25): the sum over the positions that have such a label, divided by
the tokens of the main loss; so each position weighs the same whatever micro-batch or rank it is in. Upstream
(multi_token_prediction.py, `process_mtp_loss`) divides by the labels left on this rank in this micro-batch.

With documents kept apart, a position takes part in depth k if the k tokens after it are of its own document: neither
its loss nor its routing counts else.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MultiTokenPredictionLayer, roll_tensor

from maniple.engines.megatron import context
from maniple.engines.megatron.documents import complete, documents_of, on_this_rank
from maniple.engines.megatron.loss import losses_of


class LanguageModel(GPTModel):
    """GPTModel with losses as above, for training and evaluation. Called as upstream's, but:

    `attention_mask` is None or `documents_BS` (`maniple.engines.megatron.documents`); `padding_mask` is None or bool
    `[B, S]`, True at padding. Sequences are whole, whatever context parallelism (`maniple.engines.megatron.context`):
    ids, positions, labels and masks are `[B, S]`, and losses `[B, S / CP]`, those of this rank's positions. Without
    `labels` it returns logits `[B, S / CP, V / TP]` and runs no MTP.
    """

    mtp_sums: torch.Tensor | None = None  # float64 [depths, 2]: losses and labels since they were last taken

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.share_embeddings_and_output_weights and self.mtp_process and self.post_process:
            # gpt_model.py, `skip_weight_param_allocation`, leaves a weight here past the first stage; yet the embedding
            # that MTP needs is what is used, and `tie_embeddings_and_output_weights_state_dict` refuses to save both
            self.output_layer.weight = None

    def take_mtp_sums(self) -> torch.Tensor | None:
        """Sum of MTP losses and number of their labels, by depth, of the training micro-batches since the last call."""
        sums, self.mtp_sums = self.mtp_sums, None
        return sums

    def _preprocess(self, input_ids, position_ids, padding_mask=None, **inputs):
        """Upstream's, which cuts a padding mask over tensor-parallel ranks in the pipeline's first stage only."""
        ids_BS, positions_BS = (context.cut(x, self.pg_collection.cp) for x in (input_ids, position_ids))
        prepared = super()._preprocess(input_ids=ids_BS, position_ids=positions_BS, padding_mask=None, **inputs)
        if padding_mask is None:
            return prepared
        padding_mask = on_this_rank(padding_mask, self.config, self.pg_collection.cp, self.pg_collection.tp)
        return (*prepared[:5], padding_mask)

    def _postprocess(
        self,
        hidden_states,
        input_ids,
        position_ids,
        labels,
        rotary_pos_emb,
        *,
        mtp_in_postprocess=None,
        loss_mask=None,
        attention_mask=None,
        padding_mask=None,
        **unused,
    ):
        depths = self.config.mtp_num_layers or 0
        if mtp_in_postprocess and self.post_process and labels is None:
            depths = 0  # for logits alone; another stage's MTP block has no way to know
        elif mtp_in_postprocess:
            hidden_states = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                padding_mask=padding_mask,
                embedding=self.embedding,
            )
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        hidden_states, *ahead = hidden_states.chunk(1 + depths)  # the decoder's, then each depth's, one behind another
        if labels is not None and depths:
            losses = self._mtp_losses(ahead, labels, loss_mask, documents_of(attention_mask), weight)
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses)
        if labels is None:
            logits_SBV, _ = self.output_layer(hidden_states, weight=weight)
            return logits_SBV.transpose(0, 1).contiguous()
        return self._losses(hidden_states, context.cut(labels, self.pg_collection.cp), weight)

    def _losses(self, hidden_SBD, labels_BS, weight) -> torch.Tensor:
        """fp32 `[B, S / CP]`. labels: those of this rank's positions."""
        if (how := self.config.maniple_loss) != "logits":
            return losses_of(self.output_layer, hidden_SBD, labels_BS, weight, keep_logits=how == "fused_kept")
        logits_SBV, _ = self.output_layer(hidden_SBD, weight=weight)
        return self.compute_language_model_loss(labels_BS, logits_SBV)

    def _mtp_losses(self, ahead, labels_BS, loss_mask_BS, documents_BS, weight) -> torch.Tensor:
        """fp32 `[depths, B, S / CP]`: what each position adds to the loss, before division by the batch's tokens."""
        group, losses = self.pg_collection.cp, []
        for depth, hidden_SBD in enumerate(ahead, 1):
            labels_BS, _ = roll_tensor(labels_BS)
            loss_mask_BS, _ = roll_tensor(loss_mask_BS)
            counted_BS = loss_mask_BS.float()
            if documents_BS is not None:
                counted_BS = counted_BS * complete(documents_BS, depth)
            counted_BS = context.cut(counted_BS, group)
            losses_BS = self._losses(hidden_SBD, context.cut(labels_BS, group), weight)
            losses.append(losses_BS.float() * counted_BS)
            if self.training:
                self._add_mtp_sums(depth, losses[-1].detach().sum(), counted_BS.sum())
        return torch.stack(losses) * (self.config.mtp_loss_scaling_factor / len(ahead))

    def _add_mtp_sums(self, depth: int, loss: torch.Tensor, labels: torch.Tensor) -> None:
        if self.mtp_sums is None:
            self.mtp_sums = torch.zeros(self.config.mtp_num_layers, 2, dtype=torch.float64, device=loss.device)
        self.mtp_sums[depth - 1] += torch.stack([loss, labels])


class PredictionLayer(MultiTokenPredictionLayer):
    """Upstream's MTP layer over ids and positions of whole sequences `[B, S]`, which it shifts. Upstream's are cut, and
    ranks send each other what crosses a border. The router leaves out the positions that look into another document or
    into padding.
    """

    def __init__(self, *args, pg_collection, **kwargs) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self.context_group = pg_collection.cp
        self.cp_group = None  # multi_token_prediction.py, `_get_embeddings`: what it shifts is in one piece

    def forward(self, *, attention_mask, padding_mask=None, **inputs):
        if (documents_BS := documents_of(attention_mask)) is not None:
            ahead_BS = complete(documents_BS, self.layer_number)
            padding_mask = on_this_rank(~ahead_BS, self.config, self.context_group, self.tp_group)
        return super().forward(attention_mask=attention_mask, padding_mask=padding_mask, **inputs)

    def _get_embeddings(self, *, embedding, padding_mask=None, **inputs):
        """Upstream's shifts a padding mask too, inside this rank's part of the sequence; here it is right already."""

        def embed(**whole: torch.Tensor) -> torch.Tensor:
            return embedding(**{name: context.cut(x_BS, self.context_group) for name, x_BS in whole.items()})

        found = super()._get_embeddings(embedding=embed, padding_mask=None, **inputs)
        ids_BS, positions_BS, _, embedded_SBD, hidden_SBD = found
        return ids_BS, positions_BS, padding_mask, embedded_SBD, hidden_SBD
