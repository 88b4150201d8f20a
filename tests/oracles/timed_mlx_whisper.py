# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "mlx-whisper==0.4.3",
#     "mlx[cpu]>=0.32; sys_platform == 'linux'",
#     "mlx>=0.32; sys_platform == 'darwin'",
# ]
#
# [tool.uv]
# # It asks for torch and uses it only to convert models.
# override-dependencies = ["torch; python_version < '3'"]
# ///
"""Times mlx-whisper in float32: one JSON object per line of standard input, `{"files": [...], "conditioned": true}`.

    uv run --script timed_mlx_whisper.py MLX_FOLDER

Answers each with seconds for all files, those of them in the encoder, and texts. The encoder's output is evaluated
where it is made, which on a CPU costs nothing and tells the two apart. Set HEADRACE_ORACLE_BLAS to a BLAS library to
load it before mlx.
"""

import ctypes
import json
import os
import sys
import time

if "HEADRACE_ORACLE_BLAS" in os.environ:
    ctypes.CDLL(os.environ["HEADRACE_ORACLE_BLAS"], mode=ctypes.RTLD_GLOBAL)

import mlx.core as mx
import numpy as np
from mlx_whisper.transcribe import ModelHolder, transcribe


class TimedEncoder:
    def __init__(self, encoder: object) -> None:
        self._encoder, self.seconds = encoder, 0.0

    def __call__(self, mel: mx.array) -> mx.array:
        mx.eval(mel)
        start = time.perf_counter()
        features = self._encoder(mel)
        mx.eval(features)
        self.seconds += time.perf_counter() - start
        return features


def main() -> None:
    (folder,) = sys.argv[1:]
    model = ModelHolder.get_model(folder, mx.float32)
    encoder = TimedEncoder(model.encoder)
    model.encoder = encoder
    for line in sys.stdin:
        asked = json.loads(line)
        audios = [np.load(file) for file in asked["files"]]
        encoder.seconds, start = 0.0, time.perf_counter()
        texts = [
            transcribe(
                audio,
                path_or_hf_repo=folder,
                fp16=False,
                verbose=None,
                condition_on_previous_text=asked["conditioned"],
            )["text"]
            for audio in audios
        ]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "encoding_s": encoder.seconds, "texts": texts}), flush=True)


if __name__ == "__main__":
    main()
