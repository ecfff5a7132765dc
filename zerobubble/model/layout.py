"""Layout: how many layers each stage holds."""

from __future__ import annotations

from zerobubble.errors import UserError
from zerobubble.model.config import ModelConfig
from zerobubble.schedule.placement import Placement


def layers_per_stage(
    config: ModelConfig, placement: Placement, *, allow_padding: bool = False
) -> tuple[int, ...]:
    """Layers of each stage, in layer order; they always add up to `config.layers`.

    The layers must divide over the stages, or `allow_padding` must be set: then they are
    spread as evenly as FLOPs ask. One by one, each goes where the stage's FLOPs are the least
    with it, on a tie not to the embedding's or the head's stage, then to the least loaded
    rank; as all layers cost the same, no other spread has a smaller largest stage.

    Raises UserError if the layers do not divide and padding is not allowed.
    """
    stages = placement.stages
    if config.layers % stages == 0 and not allow_padding:
        return (config.layers // stages,) * stages
    if not allow_padding:
        nearest = max(1, round(config.layers / stages)) * stages
        raise UserError(
            f"{config.layers} layers do not divide over {placement.ranks} ranks x "
            f"{placement.chunks} stages; add --allow-padding-num-layers or use {nearest}"
        )
    layer, head = layer_flops(config), head_flops(config)
    layers = [0] * stages
    stage_load = [0] * stages
    stage_load[-1] += head
    rank_load = [0] * placement.ranks
    rank_load[placement.rank_of[-1]] += head

    def cost(stage: int) -> tuple[int, bool, int, int]:
        at_an_end = stage in (0, stages - 1)
        rank = placement.rank_of[stage]
        return stage_load[stage] + layer, at_an_end, rank_load[rank], stage

    for _ in range(config.layers):
        stage = min(range(stages), key=cost)
        layers[stage] += 1
        stage_load[stage] += layer
        rank_load[placement.rank_of[stage]] += layer
    return tuple(layers)


def layer_flops(config: ModelConfig) -> int:
    """FLOPs of one layer's F for one token (2 per multiply-add), scores over all positions."""
    inner = config.heads * config.head_size
    shared = config.query_groups * config.head_size
    attention = 2 * config.hidden * (2 * inner + 2 * shared) + 4 * config.seq_length * inner
    return attention + 2 * config.hidden * config.ffn_hidden * (3 if config.swiglu else 2)


def head_flops(config: ModelConfig) -> int:
    """FLOPs of the head's F for one token; the embedding has next to none."""
    return 2 * config.hidden * config.vocab
