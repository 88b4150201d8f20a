"""From a name to a model that runs: files, configuration, weights in the device's best form, codec, identity."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_models.codec import load_codec
from headrace_models.config import read_config
from headrace_models.device import profile
from headrace_models.dtypes import check_dtype
from headrace_models.families import family_of
from headrace_models.folder import weight_files
from headrace_models.gguf_file import read_gguf
from headrace_models.sources import ModelSource, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace_models.codec import Codec
    from headrace_models.config import ModelConfig
    from headrace_models.dense import DenseModel
    from headrace_models.device import DeviceProfile
    from headrace_models.dtypes import DtypeName
    from headrace_models.weights import Checkpoint, WeightForm

__all__ = ["LoadedModel", "load", "weights_fingerprint"]

_LOG = logging.getLogger(__name__)
_ITEM_BYTES = 4
_MEMORY_SHARE = 0.6
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64


@frozen(kw_only=True)
class LoadedModel:
    """A model with everything that belongs to it. Its arrays are evaluated, so that any thread may use them."""

    model: DenseModel
    """A `RuntimeModel` of `headrace_scheduling`, by shape."""
    codec: Codec
    config: ModelConfig
    identity: str
    """sha256 over weights, their files' times, tokenizer, representation and implementation.

    Cached state of another identity never fits. The same files written anew are another one.
    """
    device: str
    """`metal`, `cuda` or `cpu`."""
    representation: str
    """What the weights are in memory, such as `float32` or `4-bit, group 32, float32`."""
    source: ModelSource
    left_out: Mapping[str, int]
    """Tensors of the checkpoint that were not read because their part is no text model, counted by part."""


def load(
    source: str | Path | ModelSource, *, dtype: DtypeName = "auto", download: bool = True, progress: bool = False
) -> LoadedModel:
    """Load a model onto the default device; returns when all weights are in memory.

    Of a model that sees or hears (gemma3, gemma4) the text model is loaded; a warning in the log and `left_out` say
    which parts are not.

    Args:
        source: a folder, a `.gguf` file, a hub id, a model that an index package carries, or what `resolve` returned.
        dtype: `auto` keeps the checkpoint's own form on Metal and CUDA, and takes float32 on a CPU, where only that
            is fast, as long as it fits; `checkpoint` keeps dtype and quantization; the others (dequantize and) cast.
        download: whether files may be fetched.
        progress: whether fetching shows its progress.

    Raises:
        SourceError: the name leads to no model, or files are incomplete.
        UnsupportedArchitecture: no family runs the model.
        UnsupportedFormat: the weights or the tokenizer are of a kind that is not read.
        WeightMismatch: weights and configuration contradict each other.
        ValueError: for an unknown `dtype`.
    """
    check_dtype(dtype)
    found = source if isinstance(source, ModelSource) else resolve(source, download=download, progress=progress)
    gguf = read_gguf(found.path) if found.format == "gguf" else None
    config = read_config(found, gguf=gguf)
    family_of(config.model_type)
    device = profile()
    with ThreadPoolExecutor(1, "headrace-codec") as pool:
        # Weights are mostly read and written by MLX's threads, beside which one of Python's has time.
        reading = pool.submit(load_codec, found, gguf=gguf, eos_token_ids=config.eos_token_ids)
        model, representation, left_out = _load_dense(found, config, dtype, device)
    codec = reading.result()
    if left_out:
        _LOG.warning("of the model %r, text alone is served; %s", found.name, _listed(left_out))
    return LoadedModel(
        model=model,
        codec=codec,
        config=config,
        identity=_identity(found, codec.identity, representation),
        device=device.kind,
        representation=representation,
        source=found,
        left_out=left_out,
    )


def _load_dense(
    source: ModelSource, config: ModelConfig, dtype: DtypeName, device: DeviceProfile
) -> tuple[DenseModel, str, Mapping[str, int]]:
    from headrace_models.building import build_dense
    from headrace_models.weights import open_checkpoint

    checkpoint = open_checkpoint(source, config)
    checkpoint.form = _choose_form(checkpoint, dtype, device)
    representation = _describe(checkpoint, checkpoint.form, config)
    return build_dense(config, checkpoint, on_gpu=device.kind != "cpu"), representation, checkpoint.left_out


def _listed(left_out: Mapping[str, int]) -> str:
    return "left out: " + ", ".join(f"{part} ({count} tensors)" for part, count in sorted(left_out.items()))


def _choose_form(checkpoint: Checkpoint, dtype: DtypeName, device: DeviceProfile) -> WeightForm:
    import mlx.core as mx

    from headrace_models.weights import WeightForm

    if dtype == "auto":
        dtype = "float32" if device.kind == "cpu" and _fits_in_float32(checkpoint, device) else "checkpoint"
    explicit = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    if dtype in explicit:
        return WeightForm(dtype=explicit[dtype], keep_packed=False)
    # A CPU multiplies packed weights with float32 activations 9 times faster than with bfloat16 ones.
    own = mx.float32 if checkpoint.is_packed and device.kind == "cpu" else checkpoint.dtype
    if checkpoint.is_decoded and device.kind != "cpu":
        own = mx.bfloat16
    return WeightForm(dtype=own, keep_packed=True)


def _fits_in_float32(checkpoint: Checkpoint, device: DeviceProfile) -> bool:
    return checkpoint.num_weights * _ITEM_BYTES <= _MEMORY_SHARE * device.memory_bytes


def _describe(checkpoint: Checkpoint, form: WeightForm, config: ModelConfig) -> str:
    name = str(form.dtype).removeprefix("mlx.core.")
    if not (form.keep_packed and checkpoint.is_packed):
        return name
    if config.quantization is None:
        return f"packed as in the file, {name}"
    mixed = " and others" if config.quantization.overrides else ""
    return f"{config.quantization.bits}-bit{mixed}, group {config.quantization.group_size}, {name}"


def weights_fingerprint(source: ModelSource) -> str:
    """Return a sha256 over name, size, time of change and 64 samples of each weight file, without reading all of it.

    The samples alone would miss a variant of the same size that differs in few rows. The time does not, and only costs
    a copy of the same files another fingerprint.
    """
    files = [source.path] if source.format == "gguf" else weight_files(source.path)
    digest = hashlib.sha256()
    for file in files:
        about = file.stat()
        size = about.st_size
        digest.update(f"{file.name}\0{size}\0{about.st_mtime_ns}\0".encode())
        with file.open("rb") as stream:
            for index in range(_NUM_SAMPLES):
                stream.seek(max(size - _SAMPLE_BYTES, 0) * index // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _identity(source: ModelSource, codec_identity: str, representation: str) -> str:
    parts = [weights_fingerprint(source), codec_identity, representation, version("headrace-models")]
    if source.format == "folder":
        parts.append((source.path / "config.json").read_text("utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
