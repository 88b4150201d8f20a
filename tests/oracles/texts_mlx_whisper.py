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
"""What mlx-whisper hears in clips, greedily, in float32: a JSON list of texts on standard output.

    uv run --script texts_mlx_whisper.py MLX_FOLDER CLIP.npy...

Set HEADRACE_ORACLE_BLAS to a BLAS library to load it before mlx.
"""

import ctypes
import json
import os
import sys

if "HEADRACE_ORACLE_BLAS" in os.environ:
    ctypes.CDLL(os.environ["HEADRACE_ORACLE_BLAS"], mode=ctypes.RTLD_GLOBAL)

import mlx_whisper
import numpy as np


def main() -> None:
    folder, *clips = sys.argv[1:]
    texts = []
    for clip in clips:
        found = mlx_whisper.transcribe(
            np.load(clip), path_or_hf_repo=folder, fp16=False, language="en", temperature=0.0, verbose=None
        )
        texts.append(found["text"])
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
