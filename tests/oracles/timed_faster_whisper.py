# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["faster-whisper==1.2.1"]
# ///
"""Times faster-whisper in float32: one JSON object per line of standard input, `{"files": [...], "conditioned": true}`.

    uv run --script timed_faster_whisper.py CTRANSLATE2_FOLDER

Answers each with seconds for all files, those of them in the encoder, and texts. Greedy, with the temperatures that all
systems fall back to; its own default is five beams.
"""

import json
import os
import sys
import time

import numpy as np
from faster_whisper import WhisperModel


class TimedModel(WhisperModel):
    encoding_s = 0.0

    def encode(self, features):
        start = time.perf_counter()
        found = super().encode(features)
        self.encoding_s += time.perf_counter() - start
        return found


def main() -> None:
    (folder,) = sys.argv[1:]
    threads = int(os.environ.get("MKL_NUM_THREADS", "1"))
    model = TimedModel(folder, device="cpu", compute_type="float32", cpu_threads=threads, local_files_only=True)
    for line in sys.stdin:
        asked = json.loads(line)
        audios = [np.load(file) for file in asked["files"]]
        model.encoding_s, start, texts = 0.0, time.perf_counter(), []
        for audio in audios:
            segments, _ = model.transcribe(
                audio, beam_size=1, best_of=1, condition_on_previous_text=asked["conditioned"]
            )
            texts.append("".join(segment.text for segment in segments))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "encoding_s": model.encoding_s, "texts": texts}), flush=True)


if __name__ == "__main__":
    main()
