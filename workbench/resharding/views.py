"""Boxes of a weight as views of the tensor in which a rank holds them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.resharding import boxes
from workbench.resharding.boxes import Box
from workbench.resharding.distribution import WeightShard


def blocks(tensor: Tensor, shard: WeightShard) -> Iterator[tuple[Box, Tensor]]:
    """Each box of a shard and its elements in the shard's tensor, a view [rows, columns]."""
    sizes = [boxes.size((box,)) for box in shard.boxes]
    parts = (tensor,) if len(sizes) == 1 else tensor.view(-1).split(sizes)
    for box, part in zip(shard.boxes, parts if sizes else (), strict=True):
        yield box, part.view(box[1] - box[0], box[3] - box[2])


def view_of(tensor: Tensor, shard: WeightShard, box: Box) -> Tensor:
    """The elements of `box`, which lies inside one box of the shard, as a view [rows, columns] of its tensor."""
    for (r0, r1, c0, c1), block in blocks(tensor, shard):
        if r0 <= box[0] and box[1] <= r1 and c0 <= box[2] and box[3] <= c1:
            return block[box[0] - r0 : box[1] - r0, box[2] - c0 : box[3] - c0]
    raise ValueError(f"{box} lies in none of {shard.boxes}")


def fill(target: Tensor, wanted: WeightShard, source: Tensor, held: WeightShard) -> None:
    """Copy what two shards of a weight have in common from the tensor of one to that of the other."""
    for box, block in blocks(source, held):
        for common in boxes.intersect((box,), wanted.boxes):
            r0, r1, c0, c1 = common
            view_of(target, wanted, common).copy_(block[r0 - box[0] : r1 - box[0], c0 - box[2] : c1 - box[2]])


def shared(tensor: Tensor, shard: WeightShard, inner: WeightShard) -> Tensor | None:
    """The tensor of the shard `inner` as a view of the tensor of `shard`; None where its boxes are not one piece
    there."""
    if not inner.boxes or boxes.subtract(inner.boxes, shard.boxes):
        return None
    try:
        pieces = [view_of(tensor, shard, box) for box in inner.boxes]
        if len(pieces) == 1:
            return pieces[0].view(inner.shape)
    except (ValueError, RuntimeError):  # a box across two boxes; a flat tensor of what lies scattered
        return None
    end = pieces[0].storage_offset()
    for piece in pieces:
        if not piece.is_contiguous() or piece.storage_offset() != end:
            return None
        end += piece.numel()
    run = torch.as_strided(pieces[0], (end - pieces[0].storage_offset(),), (1,), pieces[0].storage_offset())
    return run.view(inner.shape)
