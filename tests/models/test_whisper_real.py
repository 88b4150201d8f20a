"""Real Whisper models on real speech: the tokens, times and features that mlx-whisper gives on the same weights.

`whisper_expected.json` was written from `tests/oracles/whisper_mlx.py` (mlx-whisper 0.4.3 on MLX 0.32.4, float32), of
clips in `speech/`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace_models.audio import read_audio
from headrace_models.row_blocks import StoredTensor
from headrace_models.whisper import (
    DecodeRequest,
    TokenRules,
    TranscribeOptions,
    decode_windows,
    load_whisper,
    log_mel,
    resolve_whisper,
    transcribe,
    transcribe_batch,
)
from headrace_models.whisper.checkpoint import open_whisper_checkpoint

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "whisper_expected.json").read_text())
CASES = [(model, clip) for model, clips in EXPECTED.items() for clip in clips]
MODELS = {}


def model_of(name):
    if name not in MODELS:
        MODELS[name] = load_whisper(name, dtype="float32")
    return MODELS[name]


def speech(clip):
    (path,) = (HERE / "speech").glob(f"austen-{clip}.*")
    return read_audio(path)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "clip"), CASES)
def test_real_speech_gives_mlx_whispers_tokens(name, clip):
    """Greedy tokens are equal; features, log-probability and no-speech within what float32 and the mel's FFT leave."""
    model, wanted = model_of(name), EXPECTED[name][clip]
    mel = log_mel(speech(clip), model.config.num_mels)
    features = model.features(np.pad(mel, ((0, model.config.window_frames - len(mel)), (0, 0)))[None])
    assert float(mx.sqrt(mx.mean(features * features))) == pytest.approx(wanted["feature_rms"], abs=1e-3)
    found = np.array(features[0, [0, 1, 7], :8])
    assert np.abs(found - np.array(wanted["features"])).max() < 2e-3
    language = "en" if model.config.is_multilingual else None
    start = model.tokenizer.special.start(language=language, task="transcribe", with_timestamps=True)
    request = DecodeRequest(
        audio=model.decoder.audio_keys(features), initial=start, sot_index=0, rules=TokenRules.make(model.tokenizer)
    )
    (decoded,) = decode_windows(model, [request])
    assert list(decoded.tokens) == wanted["tokens"]
    assert decoded.avg_logprob == pytest.approx(wanted["avg_logprob"], abs=2e-3)
    assert decoded.no_speech_prob == pytest.approx(wanted["no_speech_prob"], abs=1e-3)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(EXPECTED))
def test_real_words_are_where_mlx_whisper_puts_them(name):
    """Words of all clips, decoded as one batch, are within 20 ms of the oracle's, which decodes one at a time."""
    clips = list(EXPECTED[name])
    options = TranscribeOptions(word_timestamps=True)
    for clip, found in zip(
        clips, transcribe_batch(model_of(name), [speech(clip) for clip in clips], options), strict=True
    ):
        wanted = EXPECTED[name][clip]["words"]
        assert [word.text for word in found.words] == [text for text, _, _ in wanted]
        assert found.language == "en"
        for word, (_, start, end) in zip(found.words, wanted, strict=True):
            assert abs(word.start_s - start) < 0.021
            assert abs(word.end_s - end) < 0.021


@pytest.mark.model
@pytest.mark.timeout(600)
def test_real_speech_with_beams_and_in_sixteen_bits():
    """Five beams, and bfloat16 weights, write the sentence that greedy float32 writes."""
    samples = speech("0880")
    wanted = transcribe(model_of("whisper-tiny.en"), samples).text
    assert wanted.lower().startswith("he was not a")
    assert wanted.endswith("young man.")
    assert transcribe(model_of("whisper-tiny.en"), samples, TranscribeOptions(beam_size=5)).text == wanted
    assert transcribe(load_whisper("whisper-tiny.en", dtype="bfloat16"), samples).text == wanted


@pytest.mark.model
@pytest.mark.timeout(600)
def test_real_suppressed_tokens_are_the_files_own():
    """What is suppressed are the ids that the models' own files list."""
    for name in EXPECTED:
        source = resolve_whisper(name)
        listed = json.loads((source.folder / "config.json").read_text())
        tokenizer = model_of(name).tokenizer
        rules = TokenRules.make(tokenizer)
        # The files leave no-speech out, whose probability is read before it is suppressed.
        assert set(rules.suppressed) - {tokenizer.special.no_speech} == set(listed["suppress_ids"]) - {
            tokenizer.special.no_speech
        }
        assert set(rules.suppressed_first) == set(listed["suppress_ids_begin"])


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_oracle_still_says_what_is_recorded(tmp_path):
    """mlx-whisper itself, in an environment of its own that HEADRACE_WHISPER_ORACLE names, on this machine."""
    python = os.environ.get("HEADRACE_WHISPER_ORACLE")
    if not python:
        pytest.skip("HEADRACE_WHISPER_ORACLE names no Python that has mlx-whisper; see tests/oracles/whisper_mlx.py")
    config, checkpoint = open_whisper_checkpoint(resolve_whisper("whisper-tiny.en"))
    tensors = {
        name: tensor.read(mx.float32) if isinstance(tensor, StoredTensor) else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    tensors["alignment_heads"] = mx.array(config.heads_to_align)
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), tensors)
    sizes = {
        "n_mels": config.num_mels,
        "n_audio_ctx": config.audio_context,
        "n_audio_state": config.audio_state,
        "n_audio_head": config.audio_heads,
        "n_audio_layer": config.audio_layers,
        "n_vocab": config.vocab_size,
        "n_text_ctx": config.text_context,
        "n_text_state": config.text_state,
        "n_text_head": config.text_heads,
        "n_text_layer": config.text_layers,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    np.save(tmp_path / "0880.npy", speech("0880"))
    script = HERE.parent / "oracles" / "whisper_mlx.py"
    done = subprocess.run(
        [python, str(script), str(tmp_path), str(tmp_path / "0880.npy"), "--words"], capture_output=True, check=True
    )
    (found,) = json.loads(done.stdout)
    wanted = EXPECTED["whisper-tiny.en"]["0880"]
    assert found["greedy"]["tokens"] == wanted["tokens"]
    assert [word[:3] for segment in found["segments"] for word in segment["words"]] == wanted["words"]
    assert sys.executable != python
