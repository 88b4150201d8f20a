"""Audio in: WAV is read exactly, other containers through PyAV, and whatever is wrong is an error of the audio."""

import io
import struct
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.audio import (
    AudioDecodeTimeout,
    AudioError,
    AudioLimits,
    AudioTooLarge,
    AudioTooLong,
    AudioUnreadable,
    read_audio,
)
from headrace_models.audio.resampling import resample
from headrace_models.audio.wav import read_wav


def wav(raw, *, kind=1, channels=1, rate=16_000, bits=16, size=None, extensible=False, extra=b""):
    block = channels * bits // 8
    body = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * block, block, bits)
    if extensible:
        body += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    chunks = b"fmt " + struct.pack("<I", len(body)) + body + extra
    chunks += b"data" + struct.pack("<I", len(raw) if size is None else size) + raw
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def tone(rate, hertz, seconds=1.0):
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits", "raw", "wanted"),
    [
        (1, 8, bytes([0, 128, 255]), [-1, 0, 127 / 128]),
        (1, 16, struct.pack("<3h", -32768, 0, 16384), [-1, 0, 0.5]),
        (1, 24, b"\x00\x00\x80" + bytes(3) + b"\x00\x00\x40", [-1, 0, 0.5]),
        (1, 32, struct.pack("<3i", -(2**31), 0, 2**30), [-1, 0, 0.5]),
        (3, 32, struct.pack("<3f", -1.5, 0, 0.25), [-1.5, 0, 0.25]),
        (3, 64, struct.pack("<3d", -1, 0, 0.25), [-1, 0, 0.25]),
    ],
)
def test_wav_samples_are_exact(kind, bits, raw, wanted, extensible):
    """Each sample is its share of full scale, whatever chunks stand before the samples."""
    extra = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    found = read_audio(wav(raw, kind=kind, bits=bits, extensible=extensible, extra=extra))
    assert found.dtype == np.float32
    assert found.tolist() == wanted


def test_channels_are_averaged():
    """Two channels become their mean."""
    found = read_audio(wav(struct.pack("<4h", 8192, 16384, -8192, 8192), channels=2))
    assert found.tolist() == [0.375, 0]


def test_a_streamed_wav_goes_to_its_end():
    """A size that its writer did not know yet is no error."""
    assert len(read_audio(wav(bytes(64), size=0xFFFFFFFF))) == 32


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF\0\0\0\0WAVE",
        wav(b""),
        wav(bytes(64), size=128),
        wav(bytes(64), rate=0),
        wav(bytes(64), channels=0),
        b"RIFF\0\0\0\0WAVE" + b"data" + struct.pack("<I", 4) + bytes(4),
        b"RIFF\0\0\0\0WAVE" + b"fmt " + struct.pack("<I", 2) + bytes(2),
    ],
)
def test_broken_wav_files_are_refused(data):
    """Empty, cut short and contradictory files are named as such."""
    with pytest.raises(AudioUnreadable):
        read_audio(data)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 60), byte=st.integers(0, 255), cut=st.integers(0, 108))
def test_damaged_wav_files_are_read_or_refused(place, byte, cut):
    """Whatever byte is wrong and wherever a file ends, the outcome is samples or an error of the audio."""
    data = bytearray(wav(bytes(range(64))))
    data[place] = byte
    try:
        found = read_wav(bytes(data[:cut])) if data[:4] == b"RIFF" else None
    except AudioError:
        return
    if found is not None:
        assert found[0].ndim == 1


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_tones_keep_pitch_phase_and_strength(rate):
    """A tone at another rate becomes the same tone at 16 kHz, to -70 dB."""
    found, wanted = resample(tone(rate, 1_000), rate), tone(16_000, 1_000)
    assert len(found) == len(wanted)
    assert np.abs(found[400:-400] - wanted[400:-400]).max() < 3e-4


@pytest.mark.parametrize("rate", [44_100, 48_000])
def test_what_cannot_be_represented_is_taken_out(rate):
    """A tone above 8 kHz leaves less than a thousandth, and does not come back as another."""
    assert np.abs(resample(tone(rate, 9_500), rate)[400:-400]).max() < 1e-3


def test_limits_are_named(tmp_path):
    """More bytes or seconds than allowed are refused, also of a file, which is not read whole then."""
    data = wav(bytes(64_000))
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(AudioTooLarge, match="1000 bytes"):
            read_audio(source, limits=AudioLimits(max_bytes=1_000))
        with pytest.raises(AudioTooLong, match="at most 1 s"):
            read_audio(source, limits=AudioLimits(max_duration_s=1))
    assert len(read_audio(path)) == 32_000
    with pytest.raises(AudioUnreadable, match="cannot read"):
        read_audio(tmp_path / "none.wav")


def encoded(codec, container, samples, rate=16_000):
    av = pytest.importorskip("av", reason="PyAV, the extra headrace-models[audio], is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "container", "rate", "tolerance"),
    [("flac", "flac", 16_000, 1e-4), ("pcm_s16le", "matroska", 16_000, 1e-4), ("flac", "ogg", 48_000, 5e-3)],
)
def test_containers_give_their_samples(codec, container, rate, tolerance):
    """What a lossless codec keeps comes back, at 16 kHz."""
    found = read_audio(encoded(codec, container, tone(rate, 700) / 2, rate))
    wanted = tone(16_000, 700) / 2
    assert abs(len(found) - len(wanted)) <= 32
    count = min(len(found), len(wanted))
    assert np.abs(found[400 : count - 400] - wanted[400 : count - 400]).max() < tolerance


def test_what_is_no_audio_is_refused():
    """Text, noise, playlists that name other files and cut containers are errors of the audio."""
    whole = encoded("pcm_s16le", "mov", tone(16_000, 500, 4))
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    concat = b"ffconcat version 1.0\nfile '/etc/hostname'\n"
    noise = np.random.default_rng(0).bytes(5_000)
    for data in (b"hello", noise, playlist, concat, whole[: len(whole) // 2], whole[:40]):
        with pytest.raises(AudioUnreadable):
            read_audio(data)


def test_a_cut_stream_is_noticed():
    """A FLAC file that ends early announces more than it has."""
    whole = encoded("flac", "matroska", np.random.default_rng(0).uniform(-0.5, 0.5, 160_000).astype(np.float32))
    assert len(read_audio(whole)) == pytest.approx(160_000, abs=64)
    with pytest.raises(AudioUnreadable, match="cut short"):
        read_audio(whole[: len(whole) // 3])


def test_containers_obey_limits():
    """Time and duration are looked at while decoding, not after it."""
    data = encoded("flac", "flac", tone(16_000, 500, 3))
    with pytest.raises(AudioTooLong):
        read_audio(data, limits=AudioLimits(max_duration_s=1))
    with pytest.raises(AudioDecodeTimeout):
        read_audio(data, limits=AudioLimits(max_decode_s=-1))


def test_audio_and_whisper_roots_are_light():
    """Importing the roots loads neither MLX nor numpy nor PyAV."""
    script = "import sys, headrace_models.audio, headrace_models.whisper\n"
    script += "print(sorted(set(sys.modules) & {'mlx', 'numpy', 'av', 'tokenizers', 'huggingface_hub'}))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
