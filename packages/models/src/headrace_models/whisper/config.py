"""What a Whisper model is: sizes, alignment heads and quantization, from the configurations of three formats."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from attrs import evolve, frozen

from headrace_models.errors import SourceError, UnsupportedArchitecture
from headrace_models.fields import Fields
from headrace_models.folder import read_json_object

__all__ = ["AlignmentHeads", "WhisperConfig", "read_mlx_config", "read_transformers_config"]

AlignmentHeads = tuple[tuple[int, int], ...]
"""Pairs of decoder layer and head whose cross-attention follows the audio."""

_MULTILINGUAL_VOCABULARY = 51_865
FRAMES_PER_POSITION = 2
"""Mel frames per position of the encoder's output, which is also the step of timestamps: 20 ms."""


@frozen(kw_only=True)
class WhisperConfig:
    """Sizes of a Whisper model."""

    num_mels: int
    """80, or 128 of large-v3 and turbo."""
    audio_context: int
    """Positions of the encoder's output: 1,500 for 30 seconds."""
    audio_state: int
    audio_heads: int
    audio_layers: int
    vocab_size: int
    text_context: int
    """Longest sequence of tokens, prompt included: 448."""
    text_state: int
    text_heads: int
    text_layers: int
    is_multilingual: bool
    alignment_heads: AlignmentHeads | None = None
    """None where no file names them; then all heads of the upper half of the layers count."""

    def __attrs_post_init__(self) -> None:
        for state, heads in (("audio_state", "audio_heads"), ("text_state", "text_heads")):
            size, count = getattr(self, state), getattr(self, heads)
            if size % count:
                raise SourceError(f"{state} is {size}, which {count} {heads} do not divide: correct the configuration")
        if self.audio_state != self.text_state:
            raise UnsupportedArchitecture(
                f"audio_state is {self.audio_state} and text_state {self.text_state}; Whisper's are equal"
            )
        for layer, head in self.alignment_heads or ():
            if not (0 <= layer < self.text_layers and 0 <= head < self.text_heads):
                raise SourceError(
                    f"alignment_heads names head {head} of layer {layer}; there are {self.text_layers} layers of "
                    f"{self.text_heads} heads: correct the configuration"
                )

    @property
    def window_frames(self) -> int:
        """Mel frames of a window: 3,000."""
        return self.audio_context * FRAMES_PER_POSITION

    @property
    def heads_to_align(self) -> AlignmentHeads:
        """The alignment heads, known or assumed."""
        if self.alignment_heads:
            return self.alignment_heads
        layers = range(self.text_layers // 2, self.text_layers)
        return tuple((layer, head) for layer in layers for head in range(self.text_heads))

    def with_alignment_heads(self, heads: AlignmentHeads | None) -> "WhisperConfig":
        """Return it with alignment heads that another file names; its own win."""
        return self if self.alignment_heads or not heads else evolve(self, alignment_heads=heads)


def read_mlx_config(path: Path) -> WhisperConfig:
    """Read the config.json of an mlx-community folder, whose names are OpenAI's.

    Raises:
        SourceError: a size is missing or impossible.
    """
    fields = Fields(read_json_object(path), origin=repr(str(path)))
    vocab_size = fields.count("n_vocab")
    return WhisperConfig(
        num_mels=fields.count("n_mels"),
        audio_context=fields.count("n_audio_ctx"),
        audio_state=fields.count("n_audio_state"),
        audio_heads=fields.count("n_audio_head"),
        audio_layers=fields.count("n_audio_layer"),
        vocab_size=vocab_size,
        text_context=fields.count("n_text_ctx"),
        text_state=fields.count("n_text_state"),
        text_heads=fields.count("n_text_head"),
        text_layers=fields.count("n_text_layer"),
        is_multilingual=vocab_size >= _MULTILINGUAL_VOCABULARY,
    )


def read_transformers_config(folder: Path) -> WhisperConfig:
    """Read config.json and, where it is, generation_config.json of a transformers folder.

    Raises:
        SourceError: a size is missing or impossible.
        UnsupportedArchitecture: the model is not Whisper.
    """
    path = folder / "config.json"
    fields = Fields(read_json_object(path), origin=repr(str(path)))
    if fields.text("model_type", default="whisper") != "whisper":
        raise UnsupportedArchitecture(
            f"model_type of {fields.origin} is {fields.text('model_type')!r}; speech is transcribed by 'whisper' alone"
        )
    generation_path = folder / "generation_config.json"
    generation = Fields(
        read_json_object(generation_path) if generation_path.is_file() else {}, origin=repr(str(generation_path))
    )
    vocab_size, state = fields.count("vocab_size"), fields.count("d_model")
    return WhisperConfig(
        num_mels=fields.count("num_mel_bins"),
        audio_context=fields.count("max_source_positions"),
        audio_state=state,
        audio_heads=fields.count("encoder_attention_heads"),
        audio_layers=fields.count("encoder_layers"),
        vocab_size=vocab_size,
        text_context=fields.count("max_target_positions"),
        text_state=state,
        text_heads=fields.count("decoder_attention_heads"),
        text_layers=fields.count("decoder_layers"),
        is_multilingual=generation.flag("is_multilingual", default=vocab_size >= _MULTILINGUAL_VOCABULARY),
        alignment_heads=read_alignment_heads(generation.values),
    )


def read_alignment_heads(values: Mapping[str, object]) -> AlignmentHeads | None:
    """Read `alignment_heads`, a list of pairs; None where it is absent or nothing like that."""
    found = values.get("alignment_heads")
    if not isinstance(found, list):
        return None
    pairs: list[tuple[int, int]] = []
    for item in cast("list[object]", found):
        pair = cast("list[object]", item) if isinstance(item, list) else []
        if len(pair) != len(("layer", "head")) or not all(type(part) is int for part in pair):
            return None
        layer, head = cast("list[int]", pair)
        pairs.append((layer, head))
    return tuple(pairs) or None
