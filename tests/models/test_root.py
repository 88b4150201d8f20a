"""The package root: public names stay what they are, whatever was imported before them."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "imports",
    [
        "from headrace_models import load, export",
        "from headrace_models import LoadedModel, load, export, load",
        "from headrace_models import *",
        "import headrace_models.loading, headrace_models.exporting; from headrace_models import load, export",
    ],
)
def test_functions_are_not_hidden_by_modules(imports):
    """`load` and `export` are functions in any order of imports: no module has the name of a public function."""
    script = f"{imports}\nimport headrace_models as root\n"
    script += "assert all(map(callable, (load, export, root.load, root.export)))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_modules_import_no_arrays_and_no_heavy_libraries():
    """A serving process that loads a codec pays for no MLX, numpy, gguf, jinja2 or huggingface_hub at import."""
    heavy = ["mlx", "numpy", "gguf", "jinja2", "huggingface_hub", "safetensors"]
    script = "import sys, headrace_models.codec, headrace_models.sources, headrace_models.tokenizer_files\n"
    script += f"print(sorted(set(sys.modules) & set({heavy})))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
