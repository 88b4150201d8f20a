# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["faster-whisper==1.2.1"]
# ///
"""What faster-whisper hears in clips, greedily, in float32: a JSON list of texts on standard output.

uv run --script texts_faster_whisper.py CTRANSLATE2_FOLDER CLIP.npy...
"""

import json
import os
import sys

import numpy as np
from faster_whisper import WhisperModel


def main() -> None:
    folder, *clips = sys.argv[1:]
    threads = int(os.environ.get("MKL_NUM_THREADS", "1"))
    model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=threads, local_files_only=True)
    texts = []
    for clip in clips:
        segments, _ = model.transcribe(np.load(clip), language="en", beam_size=1, temperature=0.0)
        texts.append("".join(segment.text for segment in segments))
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
