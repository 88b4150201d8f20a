"""The scripts of tests/clients, each in an environment of its own, against one server with the starter model."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parents[1] / "clients"
TIMEOUT_S = 280

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(2 * TIMEOUT_S)]


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def check(output):
    """Show what a script reports, its last line."""
    report = json.loads(output.splitlines()[-1])
    print(f"\n{report['client']} {report['version']}", *report["exercised"], sep="\n  ")
    assert report["exercised"]


def needs(*programs):
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("package", ["openai", "litellm", "instructor"])
def test_python_client(server, tmp_path, package):
    """A Python library, newest version, gets what its users expect."""
    needs("uv")
    script = CLIENTS / f"{package}_python.py"
    command = ["uv", "run", "--no-project", "--with", package, "python", str(script), server.base_url]
    check(run(command, cwd=tmp_path))


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory):
    needs("node", "npm")
    folder = tmp_path_factory.mktemp("node")
    for path in [*CLIENTS.glob("*.mjs"), CLIENTS / "package.json"]:
        shutil.copy(path, folder)
    run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder)
    return folder


@pytest.mark.parametrize("script", ["openai_npm.mjs", "ai_sdk.mjs"])
def test_npm_client(server, node_folder, script):
    """The same for packages that run in node."""
    check(run(["node", script, server.base_url], cwd=node_folder))
