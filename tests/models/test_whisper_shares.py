"""A window that is encoded in shares is the window encoded at once, and a share that fails fails the whole."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from headrace_models.whisper import load_whisper
from headrace_models.whisper.encoder import AudioEncoder
from headrace_models.whisper.split_encoding import SplitEncoder


@pytest.fixture(scope="module")
def whole(tiny_whisper_folder) -> AudioEncoder:
    """The tiny encoder, with all that it needs for 1,500 positions."""
    encoder = load_whisper(tiny_whisper_folder, dtype="float32").encoder
    encoder = encoder.encoder if isinstance(encoder, SplitEncoder) else encoder
    positions = mx.random.normal((1500, encoder.positions.shape[1]), key=mx.random.key(1))
    # As those of a loaded model: what is evaluated may go to other threads.
    mx.eval(positions)
    return AudioEncoder(encoder.convolutions, positions, encoder.blocks, encoder.norm, encoder.activation)


def mel_of(num_windows: int, num_positions: int) -> mx.array:
    return mx.random.normal((num_windows, 2 * num_positions, 16), key=mx.random.key(7))


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_windows", "num_positions"), [(1, 1500), (2, 1499), (1, 257), (3, 65), (1, 1)])
def test_shares_give_the_features_of_the_whole(num_shares, num_windows, num_positions, whole):
    """Any number of shares and positions, windows too short to divide among them, and several windows at once."""
    mel = mel_of(num_windows, num_positions)
    found = SplitEncoder(whole, num_shares)(mel)
    wanted = whole(mel)
    assert found.shape == wanted.shape
    assert float(mx.abs(found - wanted).max()) < 1e-5


def test_positions_are_embedded_as_by_two_padded_convolutions(whole):
    """Each share of the embedding is what MLX's own convolutions give there, at both ends too."""
    mel = mel_of(2, 20)
    first, second = (
        convolution.matrix.T.reshape(-1, 3, convolution.matrix.shape[0] // 3) for convolution in whole.convolutions
    )
    x = whole.activation(mx.conv1d(mel, first, padding=1) + whole.convolutions[0].bias)
    x = whole.activation(mx.conv1d(x, second, stride=2, padding=1) + whole.convolutions[1].bias)
    wanted = np.array(x + whole.positions[:20])
    for start, stop in ((0, 20), (0, 1), (1, 7), (7, 20), (19, 20)):
        assert np.abs(np.array(whole.embed(mel, start, stop)) - wanted[:, start:stop]).max() < 1e-5


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_share_that_fails_fails_the_window_and_not_the_next(failing, whole):
    """The other shares, which wait for it, end too, its error is told, and the encoder goes on."""

    class Faulty(AudioEncoder):
        def embed(self, mel, start, stop):
            if start == 300 * failing // 3:
                raise MemoryError("none left")
            return super().embed(mel, start, stop)

    parts = whole.convolutions, whole.positions, whole.blocks, whole.norm, whole.activation
    mel = mel_of(1, 300)
    wanted = np.array(SplitEncoder(whole, 3)(mel))
    with pytest.raises(MemoryError, match="none left"):
        SplitEncoder(Faulty(*parts), 3)(mel)
    assert np.array_equal(np.array(SplitEncoder(whole, 3)(mel)), wanted)


def test_windows_of_several_threads_do_not_wait_for_each_other_for_ever(whole):
    """Two models that encode at the same time take the threads in turn."""
    mels = [mel_of(1, positions) for positions in (200, 300, 400, 500)]
    mx.eval(mels)
    wanted = [np.array(whole(mel)) for mel in mels]

    def encode(mel):
        # In this thread, whose stream made it.
        return np.array(SplitEncoder(whole, 2)(mel))

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for found, one in zip(threads.map(encode, mels), wanted, strict=True):
                assert np.abs(found - one).max() < 1e-5
