"""The program `headrace`, run as a real process: what it refuses, and how."""

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "headrace_chat_server", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean | environ,
    )


def assert_one_line_refusal(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert all(part in line for part in parts), line
    assert done.stdout == ""


def test_version_is_the_distribution_s():
    """--version tells the installed version."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"headrace {version('headrace-chat-server')}\n")


def test_help_lists_every_command_and_serve_every_variable():
    """Help is complete: commands on the top page, flags and variables on the page of serve."""
    assert all(word in run("--help").stdout for word in ("serve", "fit", "convert", "export", "doctor"))
    text = run("serve", "--help").stdout
    assert all(word in text for word in ("--max-rows", "--decode-concurrency", "HEADRACE_PORT", "--config"))


@pytest.mark.parametrize("words", [["--prot", "1"], ["serve", "--max", "1"], ["serve", "a", "b"], ["export", "a"]])
def test_unknown_or_missing_words_are_usage_errors(words):
    """Unknown flags, abbreviations, surplus and missing words are refused with usage and exit code 2."""
    done = run(*words)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_serve_gets_the_right_command():
    """A bare model name is no command; the message says what to type."""
    done = run("org/model")
    assert done.returncode == 2
    assert "headrace serve org/model" in done.stderr


def test_a_wrong_value_names_its_source():
    """The message says whether flag or environment held the value; flags come before anything is loaded."""
    assert_one_line_refusal(run("--port", "70000"), "flag --port", "'70000'", "0 to 65535", "default 8080")
    refused = run(HEADRACE_MAX_ROWS="many")
    assert_one_line_refusal(refused, "environment variable HEADRACE_MAX_ROWS", "'many'", "1 to 256", "default 8")


def test_the_model_may_be_given_once():
    """MODEL and --model together are refused rather than one of them ignored."""
    assert_one_line_refusal(run("serve", "a", "--model", "b"), "twice")


def test_an_open_address_without_a_key_is_refused():
    """D17: the program as run refuses, before it binds or loads."""
    assert_one_line_refusal(run("--host", "0.0.0.0", "--port", "0"), "0.0.0.0", "--api-key", "--insecure")


def test_a_taken_port_is_told_before_any_model_is_looked_for():
    """Binding comes first, so that nobody waits for a model only to learn that the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", "/no/such/model", "--port", str(port))
    assert_one_line_refusal(refused, f"port {port}", "taken", "--port")


@pytest.mark.parametrize(
    ("host", "part"), [("no.such.host.invalid", "unknown"), ("192.0.2.1", "no address of this machine")]
)
def test_an_unusable_address_is_told(host, part):
    """A host that is unknown or another machine's is one line."""
    assert_one_line_refusal(run("--host", host, "--insecure", "--port", "0"), host, part)


def test_a_missing_model_is_one_line(tmp_path):
    """No model, an empty folder: exit code 2 without a traceback."""
    assert_one_line_refusal(run("serve", "/no/such/model", "--port", "0"), "/no/such/model")
    assert_one_line_refusal(run("serve", str(tmp_path), "--port", "0"), str(tmp_path))


def test_an_unknown_variable_is_a_warning_on_standard_error():
    """A misspelt variable does not stop the program and does not stay silent."""
    done = run("serve", "/no/such/model", "--port", "0", HEADRACE_PROT="1")
    warning, error = done.stderr.splitlines()
    assert "warning" in warning
    assert "HEADRACE_PROT" in warning
    assert "/no/such/model" in error


def test_export_writes_a_folder_once(tiny_llama, tmp_path):
    """An exported folder is a model again, and is never written over."""
    folder = tmp_path / "exported"
    done = run("export", str(tiny_llama), str(folder), "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    assert str(folder) in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert_one_line_refusal(run("export", str(tiny_llama), str(folder)), str(folder), "empty")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--bits", "7"], ["bits is 7", "2, 3, 4, 5, 6, 8"]),
        (["--group-size", "48"], ["group_size is 48", "32, 64, 128"]),
        (["--bits", "4", "--mixed", "mixed_4_6"], ["--bits 4", "--mixed mixed_4_6"]),
        (["--bits-file", "absent.toml"], ["absent.toml"]),
    ],
)
def test_convert_refuses_nonsense_before_it_looks_for_the_model(tmp_path, words, parts):
    """One line names the value and what is accepted, though the model does not exist either."""
    assert_one_line_refusal(run("convert", "no/where/at/all", str(tmp_path / "out"), *words), *parts)
    assert list(tmp_path.iterdir()) == []


def test_convert_writes_a_folder(tiny_llama, tmp_path):
    """Flags and the bits file reach the configuration of the folder, and standard output says where it is."""
    (tmp_path / "bits.toml").write_text('"*.o_proj" = 8\n')
    options = ["--group-size", "32", "--dtype", "bfloat16", "--bits-file", str(tmp_path / "bits.toml")]
    done = run("convert", str(tiny_llama), str(tmp_path / "out"), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "out") in done.stdout
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["quantization"]["bits"], settings["torch_dtype"]) == (4, "bfloat16")
    assert settings["quantization"]["model.layers.0.self_attn.o_proj"]["bits"] == 8
    refused = run("convert", str(tiny_llama), str(tmp_path / "out"), "--group-size", "32")
    assert_one_line_refusal(refused, "not an empty folder")
