"""Replaying layers in one call: the rows of layers that told the same replay lie behind each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import mlx.core as mx

from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from headrace_kvcache.replay import Arrays, Kept, Recorded, Replay

    Parts: TypeAlias = Sequence[Sequence[mx.array | None]]

# Layers, ascending, whose rows lie behind each other.
Group: TypeAlias = "tuple[int, ...]"


class JoinedReplay(NamedTuple):
    """What layers told of one step that one call can replay.

    Attributes:
        group: the layers.
        replay: their replay.
        inputs: its inputs `(L * B, ...)`.
        apart: the same of each layer, for layers whose arrays differ.
    """

    group: Group
    replay: Replay
    inputs: Sequence[mx.array]
    apart: Sequence[Sequence[mx.array]]


def join_replays(told: Sequence[Recorded]) -> list[JoinedReplay]:
    """Join what the layers told of a step: the same function of alike inputs.

    A replay without inputs knows those of its layer, and stands for that layer alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for layer, (replay, inputs) in enumerate(told):
        sign = (replay, *_signs(inputs)) if inputs else layer
        groups.setdefault(sign, []).append(layer)
    joint: list[JoinedReplay] = []
    for group in groups.values():
        apart = [told[layer][1] for layer in group]
        inputs = [mx.concatenate(list(parts)) for parts in zip(*apart, strict=True)] if len(group) > 1 else apart[0]
        joint.append(JoinedReplay(tuple(group), told[group[0]][0], inputs, apart))
    return joint


def replay_layers(
    steps: Sequence[tuple[Sequence[JoinedReplay], Kept]], states: Callable[[Group], Parts], held: dict[Group, Arrays]
) -> dict[Group, Arrays]:
    """Return what layers hold after what stays of some steps.

    Args:
        steps: what all layers told of each, and what stays of it.
        states: gives the arrays `(B, ...)` before the steps of each layer of a group.
        held: arrays `(L * B, ...)` before the steps of groups whose rows lie behind each other already.

    Returns:
        Per group its arrays `(L * B, ...)`, its layers' rows behind each other.

    Raises:
        InvalidGeometry: a replay takes inputs or returns arrays that have not one entry per row.
    """
    for joint, kept in steps:
        found: dict[Group, Arrays] = {}
        for group, replay, inputs, apart in joint:
            before = held.get(group)
            parts = states(group) if before is None else []
            if before is not None or _are_alike(parts):
                found[group] = _replayed(replay, before or joined(parts), kept.times(len(group)), inputs)
                continue
            for layer, part, own in zip(group, parts, apart, strict=True):
                found[layer,] = _replayed(replay, list(part), kept, own)
        held, states = found, _layers_of(found)
    return held


def _layers_of(found: dict[Group, Arrays]) -> Callable[[Group], Parts]:
    def states(group: Group) -> Parts:
        layers = {
            layer: part
            for held, arrays in found.items()
            for layer, part in zip(held, parted(arrays, len(held)), strict=True)
        }
        return [layers[layer] for layer in group]

    return states


def _replayed(replay: Replay, before: Arrays, kept: Kept, inputs: Sequence[mx.array]) -> Arrays:
    _check_rows("takes inputs", inputs, kept)
    arrays = replay(before, kept, *inputs)
    if len(arrays) != len(before):
        raise InvalidGeometry(f"a replay returns {len(arrays)} arrays of a layer that holds {len(before)}")
    _check_rows("returns arrays", arrays, kept)
    return arrays


def _check_rows(does: str, arrays: Sequence[mx.array | None], kept: Kept) -> None:
    for array in arrays:
        if array is not None and array.shape[0] != kept.num_rows:
            raise InvalidGeometry(
                f"a replay {does} {array.shape}, where each has one entry for each of {kept.num_rows} rows; what "
                f"belongs to the layer itself goes into a replay without inputs"
            )


def _signs(arrays: Sequence[mx.array | None]) -> list[Hashable]:
    return [None if array is None else (array.shape, array.dtype) for array in arrays]


def _are_alike(parts: Parts) -> bool:
    first = _signs(parts[0])
    return all(_signs(part) == first for part in parts[1:])


def joined(parts: Parts) -> Arrays:
    """Return arrays `(L * B, ...)`, by index, of L layers' arrays `(B, ...)`; None where the layers have none."""
    if len(parts) == 1:
        return list(parts[0])
    return [
        None if arrays[0] is None else mx.concatenate([array for array in arrays if array is not None])
        for arrays in zip(*parts, strict=True)
    ]


def parted(arrays: Arrays, num_layers: int) -> list[Arrays]:
    """Return what `joined` makes these arrays of, per layer."""
    if num_layers == 1:
        return [arrays]
    parts = [[None] * num_layers if array is None else _cut(array, num_layers) for array in arrays]
    return [list(each) for each in zip(*parts, strict=True)]


def _cut(array: mx.array, num_parts: int) -> list[mx.array]:
    length = array.shape[0] // num_parts
    return mx.split(array, range(length, array.shape[0], length))  # pyright: ignore[reportReturnType, reportArgumentType]
