"""Layout: how many layers each stage holds."""

from __future__ import annotations

from collections.abc import Iterator

from zerobubble.errors import UserError
from zerobubble.model.config import ModelConfig
from zerobubble.schedule.placement import Placement


def layers_per_stage(
    config: ModelConfig, placement: Placement, *, allow_padding: bool = False
) -> tuple[int, ...]:
    """Layers of each stage, in layer order; they always add up to `config.layers`.

    The layers must divide over the stages, or `allow_padding` must be set: then they are
    spread as evenly as FLOPs ask. The embedding's stage and the head's never hold more layers
    than one between, and those between differ by one at most. Of all such spreads this is one with
    the smallest largest stage; of these, with the smallest largest rank; of these, with the
    least sum of squares over the stages; of these, with the fewest layers beside the embedding.

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

    def badness(layers: tuple[int, ...]) -> tuple[int, int, int]:
        loads = [n * layer for n in layers]
        loads[-1] += head
        ranks = [0] * placement.ranks
        for load, rank in zip(loads, placement.rank_of, strict=True):
            ranks[rank] += load
        return max(loads), max(ranks), sum(load * load for load in loads)

    return min(_spreads(config.layers, placement, layer, head), key=badness)


def _spreads(layers: int, placement: Placement, layer: int, head: int) -> Iterator[tuple[int, ...]]:
    """For every pair of ends the best middle, by fewest layers at the ends first.

    layer, head: what one layer and the head cost.
    """
    stages = placement.stages
    if stages == 1:
        yield (layers,)
        return
    if stages == 2:
        yield from ((first, layers - first) for first in range(layers + 1))
        return
    at_most = layers // (stages - 1)
    for first in range(at_most + 1):
        for last in range(at_most + 1):
            each, over = divmod(layers - first - last, stages - 2)
            if each < max(first, last):
                break
            spread = [first, *[each] * (stages - 2), last]
            loads = [0] * placement.ranks
            for rank, count in zip(placement.rank_of, spread, strict=True):
                loads[rank] += count * layer
            loads[placement.rank_of[-1]] += head
            # The layers left over go, one a stage, to whichever rank has the least to do.
            between = list(range(1, stages - 1))
            for _ in range(over):
                stage = min(between, key=lambda s: loads[placement.rank_of[s]])
                between.remove(stage)
                spread[stage] += 1
                loads[placement.rank_of[stage]] += layer
            yield tuple(spread)


def layer_flops(config: ModelConfig) -> int:
    """FLOPs of one layer's F for one token (2 per multiply-add), scores over all positions."""
    inner = config.heads * config.head_size
    shared = config.query_groups * config.head_size
    attention = 2 * config.hidden * (2 * inner + 2 * shared) + 4 * config.seq_length * inner
    return attention + 2 * config.hidden * config.ffn_hidden * (3 if config.swiglu else 2)


def head_flops(config: ModelConfig) -> int:
    """FLOPs of the head's F for one token; the embedding has next to none."""
    return 2 * config.hidden * config.vocab
