"""Wrong words of Headrace, mlx-whisper and faster-whisper on thirty clips: a table of docs/transcription-figures.md.

    uv run python tests/benchmarks/word_errors.py [--models whisper-tiny.en whisper-base] [--texts FOLDER]

All take the same weights in float32, English, greedy without a second temperature, everything else as it is by
default. The others run by `tests/oracles/texts_*.py`, each in an environment of its own that uv makes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace_models.device import enable_fast_blas

enable_fast_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from speech_clips import Clip, all_clips  # noqa: E402
from spoken_words import words_of, wrong_words  # noqa: E402

from headrace_models.row_blocks import StoredTensor  # noqa: E402
from headrace_models.whisper import TranscribeOptions, load_whisper, resolve_whisper, transcribe  # noqa: E402
from headrace_models.whisper.checkpoint import open_whisper_checkpoint  # noqa: E402

ORACLES = Path(__file__).parent.parent / "oracles"
SYSTEMS = ("headrace", "mlx-whisper", "faster-whisper")

# ---- systems --------------------------------------------------------------------------------------------------------


def of_headrace(name: str, clips: list[Clip]) -> list[str]:
    model = load_whisper(name, dtype="float32")
    options = TranscribeOptions(language="en", temperature=0.0)
    return [transcribe(model, clip.samples, options).text for clip in clips]


def of_oracle(script: str, folder: Path, files: list[Path]) -> list[str]:
    environment = {**os.environ}
    environment.pop("VIRTUAL_ENV", None)
    blas = sorted(Path(sys.prefix).glob("lib/libmkl_rt.so*"))
    if blas:
        environment["HEADRACE_ORACLE_BLAS"] = str(blas[0])
    command = ["uv", "run", "--quiet", "--script", str(ORACLES / script), str(folder), *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(done.stdout)


def write_mlx_folder(name: str, folder: Path) -> None:
    """Write a model as mlx-whisper reads it."""
    config, checkpoint = open_whisper_checkpoint(resolve_whisper(name))
    tensors = {
        name: tensor.read(mx.float32) if isinstance(tensor, StoredTensor) else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    tensors["alignment_heads"] = mx.array(config.heads_to_align)
    mx.save_safetensors(str(folder / "weights.safetensors"), tensors)
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
    (folder / "config.json").write_text(json.dumps(sizes))


def write_ctranslate2_folder(name: str, folder: Path) -> None:
    """Put a model's files into one folder, its parts into one file."""
    source = resolve_whisper(name)
    with (folder / "model.bin").open("wb") as file:
        for part in source.weights:
            file.write(part.read_bytes())
    for path in source.folder.iterdir():
        if path.suffix in {".json", ".txt"}:
            (folder / path.name).write_bytes(path.read_bytes())


def heard_by_all(name: str, clips: list[Clip]) -> dict[str, list[str]]:
    """Return what each system hears, clip by clip."""
    found = {"headrace": of_headrace(name, clips)}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        files = [root / f"{place:02}.npy" for place in range(len(clips))]
        for file, clip in zip(files, clips, strict=True):
            np.save(file, clip.samples)
        for system, write in (("mlx-whisper", write_mlx_folder), ("faster-whisper", write_ctranslate2_folder)):
            folder = root / system
            folder.mkdir()
            write(name, folder)
            found[system] = of_oracle(f"texts_{system.replace('-', '_')}.py", folder, files)
            print(f"{name}: {system} has heard all", file=sys.stderr)
    return found


# ---- tables ---------------------------------------------------------------------------------------------------------


def report(name: str, clips: list[Clip], texts: dict[str, list[str]]) -> None:
    said = [words_of(clip.text) for clip in clips]
    wrong = {
        system: [wrong_words(words, words_of(text)) for words, text in zip(said, texts[system], strict=True)]
        for system in SYSTEMS
    }
    total, num_words = {system: sum(counts) for system, counts in wrong.items()}, sum(map(len, said))
    allowed = min(total["mlx-whisper"], total["faster-whisper"]) + max(3.0, 0.005 * num_words)
    print(f"\n### {name}\n\n| clip | what | s | words | {' | '.join(SYSTEMS)} |\n|---|---|---|---|---|---|---|")
    for place, clip in enumerate(clips):
        counts = " | ".join(str(wrong[system][place]) for system in SYSTEMS)
        print(f"| {clip.name} | {clip.kind} | {clip.duration_s:.1f} | {len(said[place])} | {counts} |")
    totals = " | ".join(f"{total[system]} ({100 * total[system] / num_words:.1f} %)" for system in SYSTEMS)
    seconds = sum(clip.duration_s for clip in clips)
    print(f"| all | | {seconds:.1f} | {num_words} | {totals} |")
    verdict = "holds" if total["headrace"] <= allowed else "does not hold"
    print(f"\nAt most {allowed:.1f} wrong words are asked of Headrace: {verdict}.")
    for system in SYSTEMS[1:]:
        num_equal = sum(
            own.strip() == other.strip() for own, other in zip(texts["headrace"], texts[system], strict=True)
        )
        print(f"Headrace and {system} wrote {num_equal} of {len(clips)} texts alike, to the letter.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["whisper-tiny.en", "whisper-base"])
    parser.add_argument("--texts", type=Path, help="a folder to keep what was heard in, as JSON")
    options = parser.parse_args()
    clips = all_clips()
    for name in options.models:
        texts = heard_by_all(name, clips)
        if options.texts is not None:
            options.texts.mkdir(parents=True, exist_ok=True)
            kept = [
                {"clip": clip.name, "said": clip.text, **{system: texts[system][place] for system in SYSTEMS}}
                for place, clip in enumerate(clips)
            ]
            (options.texts / f"{name}.json").write_text(json.dumps(kept, indent=1))
        report(name, clips, texts)


if __name__ == "__main__":
    main()
