"""A Whisper model that runs: encoder, decoder, tokenizer and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from headrace_models.whisper.caches import AudioKeys
    from headrace_models.whisper.config import WhisperConfig
    from headrace_models.whisper.decoder import TextDecoder
    from headrace_models.whisper.encoder import Encoder
    from headrace_models.whisper.host import LogSumExp
    from headrace_models.whisper.tokenizer import WhisperTokenizer

__all__ = ["WhisperModel"]


@frozen(kw_only=True, eq=False)
class WhisperModel:
    """A loaded Whisper model. Its arrays are evaluated; one thread at a time may run it."""

    config: WhisperConfig
    tokenizer: WhisperTokenizer
    encoder: Encoder
    decoder: TextDecoder
    log_sum_exp: LogSumExp
    """As the device computes it best."""
    dtype: mx.Dtype
    """Of activations; logits and log-probabilities are float32."""
    name: str
    device: str
    """`metal`, `cuda` or `cpu`."""
    representation: str
    """What the weights are in memory, such as `float32` or `4-bit, group 64, float16`."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def weights_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def features(self, mel: NDArray[np.float32]) -> mx.array:
        """Encode log-mel windows `(B, 2 * N, num_mels)` to features `(B, N, state)`."""
        return self.encoder(mx.array(mel).astype(self.dtype))

    def encode(self, mel: NDArray[np.float32]) -> AudioKeys:
        """Encode log-mel windows `(B, 2 * N, num_mels)` to the keys and values that the decoder attends to."""
        keys = self.decoder.audio_keys(self.features(mel))
        mx.eval(keys.layers)
        return keys

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.encoder.arrays()
        yield from self.decoder.arrays()
