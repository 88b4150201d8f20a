"""Headrace, mlx-whisper and faster-whisper on the same speech: seconds, the encoder's share of them, and ratios.

    uv run python tests/benchmarks/whisper_speed.py [--cases one long eight] [--rounds 3] [--model whisper-base]

`one` is 37 seconds of real speech with defaults; `long` five minutes and more without conditioning on previous text;
`eight` eight files of about 33 seconds with defaults, which Headrace decodes as one batch. All take the same weights in
float32 and are greedy; mlx-whisper gets the same BLAS. Each system loads once, in a process of its own, hears
`one` once unmeasured, and then a case once a round; the order turns round, and ratios are of the same round. A system
whose words differ from Headrace's by more than a tenth is not compared, because it did other work. "Decoding" is
everything but the encoder; the keys and values that the decoder attends to count as the encoder's in Headrace alone.

The others run by `tests/oracles/timed_*.py`, each in an environment of its own that uv makes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from attrs import define, field, frozen
from speech_clips import RATE, Samples, all_clips, joined
from word_errors import ORACLES, words_of, write_ctranslate2_folder, write_mlx_folder, wrong_words

BASELINES = {"mlx-whisper": write_mlx_folder, "faster-whisper": write_ctranslate2_folder}
LONG_S, NUM_FILES, FILE_S = 300, 8, 24
MOST_DIFFERENT = 0.1


# ---- what is heard --------------------------------------------------------------------------------------------------


@frozen
class Case:
    name: str
    audios: list[Samples]
    conditioned: bool


def make_cases() -> dict[str, Case]:
    """Join the clips that all systems understand: real and carried ones, and those that are spoken at usual speed."""
    clips = {clip.name: clip.samples for clip in all_clips()}
    clear = [samples for name, samples in clips.items() if name not in ("austen-all", "us-fast", "gb-silence")]
    order = np.random.default_rng(7)
    return {
        "one": Case("one", [clips["austen-all"]], conditioned=True),
        "long": Case("long", [filled(clear, LONG_S, order)], conditioned=False),
        "eight": Case("eight", [filled(clear, FILE_S, order) for _ in range(NUM_FILES)], conditioned=True),
    }


def filled(clips: list[Samples], least_s: float, order: np.random.Generator) -> Samples:
    """Join clips in any order until they last long enough."""
    parts: list[Samples] = []
    while sum(map(len, parts)) < least_s * RATE:
        parts += [clips[place] for place in order.permutation(len(clips))]
    lengths = np.cumsum([len(part) for part in parts])
    return joined(parts[: int(np.searchsorted(lengths, least_s * RATE)) + 1], 0.4)


# ---- systems --------------------------------------------------------------------------------------------------------


@frozen
class Run:
    seconds: float
    encoding_s: float
    texts: list[str]

    @property
    def decoding_s(self) -> float:
        """Everything but the encoder."""
        return self.seconds - self.encoding_s


@define
class System:
    """A process that answers a line with a line."""

    name: str
    process: subprocess.Popen[str]
    runs: dict[str, list[Run]] = field(factory=dict)

    def hear(self, case: Case, files: list[Path]) -> Run:
        asked = {"files": list(map(str, files)), "conditioned": case.conditioned}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        return Run(**json.loads(answer))


def started(name: str, model: str, root: Path) -> System:
    environment = {**os.environ}
    if name == "headrace":
        command = [sys.executable, __file__, "--serve", "--model", model]
    else:
        environment.pop("VIRTUAL_ENV", None)
        blas = sorted(Path(sys.prefix).glob("lib/libmkl_rt.so*"))
        if blas:
            environment["HEADRACE_ORACLE_BLAS"] = str(blas[0])
        folder = root / name
        folder.mkdir()
        BASELINES[name](model, folder)
        script = ORACLES / f"timed_{name.replace('-', '_')}.py"
        command = ["uv", "run", "--quiet", "--script", str(script), str(folder)]
    pipe = subprocess.PIPE
    return System(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))


def serve_headrace(name: str) -> None:
    """Answer for Headrace: this process is its program."""
    from headrace_models.whisper import TranscribeOptions, Transcriber, load_whisper
    from headrace_models.whisper.backend import ModelBackend

    class TimedBackend(ModelBackend):
        seconds = 0.0

        def encode(self, mels):
            start = time.perf_counter()
            found = super().encode(mels)
            TimedBackend.seconds += time.perf_counter() - start
            return found

    model = load_whisper(name, dtype="float32")
    for line in sys.stdin:
        asked = json.loads(line)
        audios = [np.load(file) for file in asked["files"]]
        options = TranscribeOptions(condition_on_previous_text=asked["conditioned"])
        TimedBackend.seconds, start = 0.0, time.perf_counter()
        transcriber, texts = Transcriber(TimedBackend(model)), {}
        for audio in audios:
            transcriber.add(audio, options)
        while not transcriber.is_idle:
            for event in transcriber.step():
                if event.result is not None:
                    texts[event.take_id] = event.result.text
        seconds = time.perf_counter() - start
        run = {"seconds": seconds, "encoding_s": TimedBackend.seconds, "texts": [texts[take] for take in sorted(texts)]}
        print(json.dumps(run), flush=True)


# ---- figures --------------------------------------------------------------------------------------------------------


def difference(own: Run, other: Run) -> float:
    """Return the share of words that differ."""
    pairs = [(words_of(a), words_of(b)) for a, b in zip(own.texts, other.texts, strict=True)]
    return sum(wrong_words(b, a) for a, b in pairs) / max(1, sum(len(b) for _, b in pairs))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"


def report(case: Case, systems: list[System]) -> None:
    own = systems[0].runs[case.name]
    audio_s = sum(map(len, case.audios)) / RATE
    print(f"\n{case.name}: {audio_s:.0f} s of audio in {len(case.audios)} files, medians of {len(own)} rounds")
    for system in systems:
        runs = system.runs[case.name]
        whole, encoding = (statistics.median(getattr(run, part) for run in runs) for part in ("seconds", "encoding_s"))
        print(f"  {system.name:15} {whole:7.2f} s, {100 * encoding / whole:3.0f} % of it in the encoder")
    for system in systems[1:]:
        pairs = list(zip(own, system.runs[case.name], strict=True))
        different = difference(own[-1], system.runs[case.name][-1])
        if different > MOST_DIFFERENT:
            print(f"  {system.name}: {100 * different:.0f} % of the words differ: not compared")
            continue
        whole = spread([other.seconds / mine.seconds for mine, other in pairs])
        decoding = spread([other.decoding_s / mine.decoding_s for mine, other in pairs])
        encoding = spread([other.encoding_s / mine.encoding_s for mine, other in pairs])
        print(f"  {system.name} / headrace: whole {whole}, decoding {decoding}, encoder {encoding}; ", end="")
        print(f"{100 * different:.1f} % of the words differ")


def saved(case: Case, root: Path) -> list[Path]:
    files = [root / f"{case.name}-{place}.npy" for place in range(len(case.audios))]
    for file, audio in zip(files, case.audios, strict=True):
        np.save(file, audio)
    return files


def measure(case: Case, systems: list[System], num_rounds: int, root: Path) -> None:
    files = saved(case, root)
    for index in range(num_rounds):
        for system in reversed(systems) if index % 2 else systems:
            run = system.hear(case, files)
            told = f"{case.name} round {index + 1}: {system.name} {run.seconds:.2f} s"
            print(f"{told}, encoder {run.encoding_s:.2f} s", flush=True)
            system.runs.setdefault(case.name, []).append(run)
    report(case, systems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("one", "long", "eight"), default=["one", "long", "eight"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--without", nargs="*", default=[], choices=list(BASELINES))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_headrace(options.model)
        return
    cases = make_cases()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        names = ["headrace", *(name for name in BASELINES if name not in options.without)]
        systems = [started(name, options.model, root) for name in names]
        try:
            for system in systems:
                system.hear(cases["one"], saved(cases["one"], root))
            for name in options.cases:
                measure(cases[name], systems, options.rounds, root)
        finally:
            for system in systems:
                system.process.stdin.close()
                system.process.wait()


if __name__ == "__main__":
    main()
