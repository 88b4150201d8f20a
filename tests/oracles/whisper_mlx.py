"""What mlx-whisper says of the same weights and audio, as JSON on standard output.

Runs in an environment of its own, never in the project's: it needs mlx-whisper (installed without its dependencies),
mlx, numpy, numba, scipy, tiktoken, more-itertools, tqdm and huggingface-hub.

    python whisper_mlx.py MLX_FOLDER AUDIO.npy... [--language en] [--task transcribe] [--words]

Audio is float32 mono at 16 kHz. Set HEADRACE_ORACLE_BLAS to a BLAS library to load it before mlx, so that both sides
multiply with the same one.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

if "HEADRACE_ORACLE_BLAS" in os.environ:
    ctypes.CDLL(os.environ["HEADRACE_ORACLE_BLAS"], mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
import numpy as np
from mlx_whisper.audio import N_FRAMES, log_mel_spectrogram, pad_or_trim
from mlx_whisper.decoding import DecodingOptions, decode
from mlx_whisper.transcribe import ModelHolder, transcribe

_SAMPLED_POSITIONS = (0, 1, 7, 100, 700, 1499)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("audio", nargs="+")
    parser.add_argument("--language")
    parser.add_argument("--task", default="transcribe")
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--timing", action="store_true", help="only transcribe, and say how long it took")
    parser.add_argument("--unconditioned", action="store_true")
    options = parser.parse_args()
    found = [_facts(options, path) for path in options.audio]
    json.dump(found, sys.stdout)


def _facts(options: argparse.Namespace, path: str) -> dict[str, object]:
    audio = np.load(path)
    model = ModelHolder.get_model(options.folder, mx.float32)
    facts: dict[str, object] = {"audio": Path(path).name}
    if not options.timing:
        mel = log_mel_spectrogram(audio, n_mels=model.dims.n_mels)
        window = pad_or_trim(mel, N_FRAMES, axis=-2)[None]
        features = model.encoder(window)
        facts["mel_mean"] = float(mel.mean())
        facts["features"] = np.array(features[0, list(_SAMPLED_POSITIONS), :8]).tolist()
        facts["feature_rms"] = float(mx.sqrt(mx.mean(features * features)))
        language = options.language or ("en" if not model.is_multilingual else None)
        one = DecodingOptions(fp16=False, language=language, task=options.task)
        (result,) = decode(model, features, one)
        facts["greedy"] = {
            "tokens": result.tokens,
            "avg_logprob": result.avg_logprob,
            "no_speech_prob": result.no_speech_prob,
            "compression_ratio": result.compression_ratio,
            "language": result.language,
        }
    start = time.perf_counter()
    whole = transcribe(
        audio,
        path_or_hf_repo=options.folder,
        fp16=False,
        language=options.language,
        task=options.task,
        word_timestamps=options.words,
        condition_on_previous_text=not options.unconditioned,
    )
    facts["seconds"] = time.perf_counter() - start
    facts["language"] = whole["language"]
    facts["text"] = whole["text"]
    facts["segments"] = [
        {
            "start": float(segment["start"]),
            "end": float(segment["end"]),
            "tokens": [int(token) for token in segment["tokens"]],
            "temperature": float(segment["temperature"]),
            "words": [
                [word["word"], float(word["start"]), float(word["end"]), float(word["probability"])]
                for word in segment.get("words", [])
            ],
        }
        for segment in whole["segments"]
        if segment["tokens"]
    ]
    return facts


if __name__ == "__main__":
    main()
