"""The tensors that a Whisper checkpoint must have, without arrays."""

import re
from collections.abc import Collection, Iterator

from headrace_models.errors import WeightMismatch
from headrace_models.whisper.config import WhisperConfig

__all__ = ["check_num_blocks", "whisper_shapes"]

_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.")


def check_num_blocks(config: WhisperConfig, names: Collection[str]) -> None:
    """Hold the numbers of layers against tensor names, before anything is made per layer.

    Raises:
        WeightMismatch: the checkpoint has more or fewer layers.
    """
    expected = {"encoder": config.audio_layers, "decoder": config.text_layers}
    found = {"encoder": 0, "decoder": 0}
    for match in filter(None, map(_BLOCK.match, names)):
        found[match[1]] = max(found[match[1]], int(match[2]) + 1)
    for side, count in expected.items():
        if found[side] != count:
            raise WeightMismatch(
                f"the configuration has {count} {side} layers, but the weights have {found[side]}. "
                "Check that config.json and the weight files belong together and that the download is complete."
            )


def whisper_shapes(config: WhisperConfig) -> dict[str, tuple[int, ...]]:
    """Return every needed tensor with its unpacked shape."""
    state = config.audio_state
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (state, 3, config.num_mels),
        "encoder.conv1.bias": (state,),
        "encoder.conv2.weight": (state, 3, state),
        "encoder.conv2.bias": (state,),
        "decoder.token_embedding.weight": (config.vocab_size, state),
        "decoder.positional_embedding": (config.text_context, state),
    }
    shapes.update(_norm("encoder.ln_post", state))
    shapes.update(_norm("decoder.ln", state))
    for side, count in (("encoder", config.audio_layers), ("decoder", config.text_layers)):
        block = dict(_block(state, has_cross=side == "decoder"))
        for index in range(count):
            shapes.update({f"{side}.blocks.{index}.{name}": shape for name, shape in block.items()})
    return shapes


def _block(state: int, *, has_cross: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for attention in ("attn", "cross_attn") if has_cross else ("attn",):
        yield from _norm(f"{attention}_ln", state)
        for name in ("query", "key", "value", "out"):
            yield f"{attention}.{name}.weight", (state, state)
            if name != "key":
                yield f"{attention}.{name}.bias", (state,)
    yield from _norm("mlp_ln", state)
    yield from (("mlp1.weight", (4 * state, state)), ("mlp1.bias", (4 * state,)))
    yield from (("mlp2.weight", (state, 4 * state)), ("mlp2.bias", (state,)))


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)
