"""From a name to a Whisper model that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import mlx.core as mx

from headrace_models.assembly import Assembly
from headrace_models.cpu_layout import head_for_cpu
from headrace_models.device import profile
from headrace_models.dtypes import check_dtype
from headrace_models.layers import Dense, Embedding, LayerNorm, Linear, Packed, fuse
from headrace_models.weights import WeightForm
from headrace_models.whisper.blocks import FeedForward
from headrace_models.whisper.checkpoint import open_whisper_checkpoint
from headrace_models.whisper.decoder import CrossAttention, DecoderBlock, SelfAttention, TextDecoder
from headrace_models.whisper.encoder import AudioEncoder, Convolution, EncoderBlock, sinusoids
from headrace_models.whisper.host import attend, attend_on_host, gelu, gelu_on_host, log_sum_exp, log_sum_exp_on_host
from headrace_models.whisper.model import WhisperModel
from headrace_models.whisper.shapes import check_num_blocks, whisper_shapes
from headrace_models.whisper.sources import WhisperSource, resolve_whisper
from headrace_models.whisper.split_encoding import SplitEncoder, num_shares
from headrace_models.whisper.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_models.dtypes import DtypeName
    from headrace_models.layers import Projection
    from headrace_models.weights import Checkpoint
    from headrace_models.whisper.config import WhisperConfig
    from headrace_models.whisper.encoder import Encoder

__all__ = ["load_whisper"]

_Block = TypeVar("_Block", EncoderBlock, DecoderBlock)

_EPSILON = 1e-5
_EMBEDDING = "decoder.token_embedding"


def load_whisper(
    source: str | Path | WhisperSource, *, dtype: DtypeName = "auto", download: bool = True, progress: bool = False
) -> WhisperModel:
    """Load a Whisper model onto the default device; returns when all weights are in memory.

    Args:
        source: a folder (MLX, transformers or CTranslate2), a hub id, a short name of `WHISPER_INDEX_MODELS`, or what
            `resolve_whisper` returned.
        dtype: `auto` keeps the checkpoint's own form on Metal and CUDA, and takes float32 on a CPU, where only that is
            fast; `checkpoint` keeps dtype and quantization; the others (dequantize and) cast.
        download: whether files may be fetched.
        progress: whether fetching shows its progress.

    Raises:
        SourceError: the name leads to no model, or files are incomplete.
        UnsupportedFormat: a file is of a kind that is not read.
        UnsupportedArchitecture: the model is not Whisper.
        WeightMismatch: weights and configuration contradict each other.
        ValueError: for an unknown `dtype`.
    """
    check_dtype(dtype)
    found = (
        source if isinstance(source, WhisperSource) else resolve_whisper(source, download=download, progress=progress)
    )
    config, checkpoint = open_whisper_checkpoint(found)
    check_num_blocks(config, checkpoint.tensors)
    checkpoint.check(whisper_shapes(config))
    device = profile().kind
    form = checkpoint.form = _choose_form(checkpoint, dtype, on_gpu=device != "cpu", format_=found.format)
    assembly = Assembly(on_gpu=device != "cpu")
    builder = _Builder(checkpoint, assembly, on_host=device == "cpu" and form.dtype == mx.float32)
    embedding = builder.embedding()
    # Meanwhile: the embedding is a third of a small model, and reading a vocabulary keeps Python as long.
    tokenizer = load_tokenizer(found.tokenizer, config.vocab_size, is_multilingual=config.is_multilingual)
    encoder, decoder = builder.encoder(config), builder.decoder(config, embedding)
    assembly.finish()
    return WhisperModel(
        config=config,
        tokenizer=tokenizer,
        encoder=encoder,
        decoder=decoder,
        log_sum_exp=log_sum_exp_on_host if device == "cpu" else log_sum_exp,
        dtype=form.dtype,
        name=found.name,
        device=device,
        representation=_describe(decoder.blocks[0].self_attention.query_key_value, form),
    )


def _choose_form(checkpoint: Checkpoint, dtype: DtypeName, *, on_gpu: bool, format_: str) -> WeightForm:
    explicit = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    if dtype == "auto" and not on_gpu:
        return WeightForm(dtype=mx.float32, keep_packed=False)
    if dtype in explicit:
        return WeightForm(dtype=explicit[dtype], keep_packed=False)
    if format_ == "ctranslate2":
        return WeightForm(dtype=mx.float16, keep_packed=False)
    own = next(
        checkpoint.tensors[name].dtype
        for name in (f"{_EMBEDDING}.scales", f"{_EMBEDDING}.weight", *checkpoint.tensors)
        if name in checkpoint.tensors and mx.issubdtype(checkpoint.tensors[name].dtype, mx.floating)
    )
    # A CPU multiplies packed weights with float32 activations 9 times faster than with 16-bit ones.
    return WeightForm(dtype=mx.float32 if checkpoint.is_packed and not on_gpu else own, keep_packed=True)


class _Builder:
    """Takes a checkpoint's tensors block by block, so that each source is freed at once."""

    def __init__(self, checkpoint: Checkpoint, assembly: Assembly, *, on_host: bool) -> None:
        self._checkpoint, self._assembly = checkpoint, assembly
        self._on_host = on_host
        self._attend = attend_on_host if on_host else attend
        self._activation = gelu_on_host if on_host else gelu

    def embedding(self) -> Embedding:
        with self._assembly.stream(1):
            table = self._checkpoint.take_matrix(_EMBEDDING)
            embedding = Embedding(head_for_cpu(table) if self._on_host else table)
        self._assembly.start(list(embedding.arrays()))
        return embedding

    def encoder(self, config: WhisperConfig) -> Encoder:
        take = self._checkpoint
        dtype = cast("WeightForm", take.form).dtype
        convolutions = tuple(
            Convolution.from_kernel(
                take.take_tensor(f"encoder.conv{number}.weight"), take.take_tensor(f"encoder.conv{number}.bias"), number
            )
            for number in (1, 2)
        )
        positions = sinusoids(config.audio_context, config.audio_state).astype(dtype)
        blocks = [self._started(self._encoder_block, "encoder", index, config) for index in range(config.audio_layers)]
        convolution_pair = (convolutions[0], convolutions[1])
        norm = self._norm("encoder.ln_post")
        self._assembly.start([positions, *norm.arrays(), *(array for one in convolutions for array in one.arrays())])
        encoder = AudioEncoder(convolution_pair, positions, tuple(blocks), norm, self._activation)
        return SplitEncoder(encoder, num_shares()) if self._on_host and num_shares() > 1 else encoder

    def decoder(self, config: WhisperConfig, embedding: Embedding) -> TextDecoder:
        positions = self._checkpoint.take_tensor("decoder.positional_embedding")
        blocks = [self._started(self._decoder_block, "decoder", index, config) for index in range(config.text_layers)]
        norm = self._norm("decoder.ln")
        self._assembly.start([positions, *norm.arrays()])
        return TextDecoder(embedding, positions, tuple(blocks), norm)

    def _started(
        self, make: Callable[[str, WhisperConfig], _Block], side: str, index: int, config: WhisperConfig
    ) -> _Block:
        with self._assembly.stream(index):
            block = make(f"{side}.blocks.{index}", config)
        self._assembly.start(list(block.arrays()))
        return block

    def _encoder_block(self, path: str, config: WhisperConfig) -> EncoderBlock:
        return EncoderBlock(
            self._norm(f"{path}.attn_ln"),
            self._fused(f"{path}.attn", ("query", "key", "value")),
            self._checkpoint.take_linear(f"{path}.attn.out"),
            self._feed_forward(path),
            config.audio_heads,
            self._attend,
        )

    def _decoder_block(self, path: str, config: WhisperConfig) -> DecoderBlock:
        take, heads = self._checkpoint, config.text_heads
        own = SelfAttention(
            self._norm(f"{path}.attn_ln"),
            self._fused(f"{path}.attn", ("query", "key", "value")),
            take.take_linear(f"{path}.attn.out"),
            heads,
        )
        cross = CrossAttention(
            self._norm(f"{path}.cross_attn_ln"),
            take.take_linear(f"{path}.cross_attn.query"),
            self._fused(f"{path}.cross_attn", ("key", "value")),
            take.take_linear(f"{path}.cross_attn.out"),
            heads,
            self._attend,
        )
        return DecoderBlock(own, cross, self._feed_forward(path))

    def _fused(self, path: str, names: tuple[str, ...]) -> Projection:
        parts = [self._checkpoint.take_linear(f"{path}.{name}") for name in names]
        dtype = cast("WeightForm", self._checkpoint.form).dtype
        # Keys have no bias; zeros let them be stacked with what has one.
        return fuse(
            [
                part if part.bias is not None else Linear(part.weight, mx.zeros(part.weight.num_rows, dtype))
                for part in parts
            ]
        )

    def _feed_forward(self, path: str) -> FeedForward:
        return FeedForward(
            self._norm(f"{path}.mlp_ln"),
            self._checkpoint.take_linear(f"{path}.mlp1"),
            self._checkpoint.take_linear(f"{path}.mlp2"),
            self._activation,
        )

    def _norm(self, path: str) -> LayerNorm:
        gain, bias = (self._checkpoint.take_vector(f"{path}.{part}") for part in ("weight", "bias"))
        return LayerNorm(gain, bias, _EPSILON)


def _describe(projection: object, form: WeightForm) -> str:
    name = str(form.dtype).removeprefix("mlx.core.")
    weight = projection.weight if isinstance(projection, Linear) else None
    if isinstance(weight, Dense) or weight is None:
        return name
    packed = cast("Packed", weight)
    return f"{packed.bits}-bit, group {packed.group_size}, {name}"
