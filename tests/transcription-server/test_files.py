"""`headrace-transcribe file`: transcripts of files in every format, several at a time, and what is wrong with one."""

import json

import pytest

from headrace_models.transcription import TranscriptionService
from headrace_transcription_server import cli, files


@pytest.fixture(autouse=True)
def _parrot_service(monkeypatch, parrot):
    def make(settings):
        return TranscriptionService(parrot, model_id="parrot", idle_unload_s=None, transport="thread")

    monkeypatch.setattr(files, "make_service", make)


@pytest.mark.parametrize(
    ("format_", "wanted"),
    [
        ("txt", "Hello <there>\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\nHello <there>\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello &lt;there&gt;\n\n"),
    ],
)
def test_a_transcript_is_printed(format_, wanted, tone, tmp_path, capsys):
    """On standard output, and nothing beside it where there is no terminal."""
    path = tmp_path / "a.wav"
    path.write_bytes(tone)
    assert cli.main(["file", str(path), "--format", format_]) == 0
    assert capsys.readouterr() == (wanted, "")


def test_words_are_in_the_verbose_object(tone, tmp_path):
    """With their times, in the file that is named."""
    path, target = tmp_path / "a.wav", tmp_path / "out.json"
    path.write_bytes(tone)
    assert cli.main(["file", str(path), "--format", "verbose_json", "--words", "-o", str(target)]) == 0
    body = json.loads(target.read_text())
    assert body["text"] == "Hello <there>"
    assert body["words"][0] == {"word": "Hello", "start": 0, "end": 0.25, "probability": 0.9}


def test_several_files_go_to_a_folder_and_one_at_fault_stops_no_other(tone, tmp_path, capsys):
    """Its name and reason are told at the end, with exit code 2; the others are written."""
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(tone)
    (tmp_path / "bad.wav").write_bytes(b"not sound")
    paths = [str(tmp_path / name) for name in ("a.wav", "bad.wav", "b.wav")]
    assert cli.main(["file", *paths, "--format", "srt", "--output", str(tmp_path / "out")]) == 2
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["a.srt", "b.srt"]
    error = capsys.readouterr().err
    assert "bad.wav" in error
    assert error.count("\n") == 1


def test_a_terminal_sees_a_bar(tone, tmp_path, monkeypatch, capsys):
    """On standard error, so that the transcript can go through a pipe."""
    path = tmp_path / "speech.wav"
    path.write_bytes(tone)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["file", str(path)]) == 0
    output, error = capsys.readouterr()
    assert output == "Hello <there>\n"
    assert "speech.wav" in error
    assert "100%" in error
