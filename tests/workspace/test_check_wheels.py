"""The wheel check finds what it is there to find."""

import importlib.util
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def check_wheels(repository):
    spec = importlib.util.spec_from_file_location("check_wheels", repository / "scripts" / "check_wheels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def member(check_wheels, tmp_path):
    project = {
        "name": "headrace-sample",
        "dependencies": ["attrs>=25", "mlx>=0.32; sys_platform == 'darwin'"],
        "optional-dependencies": {"cpu": ["mlx[cpu]>=0.32; sys_platform == 'linux'"]},
    }
    return check_wheels.Member(folder=tmp_path, project=project)


METADATA = """\
Metadata-Version: 2.4
Name: headrace-sample
Version: 0.1.0
Provides-Extra: cpu
Requires-Dist: mlx >=0.32 ; sys_platform == 'darwin'
Requires-Dist: attrs>=25
Requires-Dist: mlx[cpu]>=0.32 ; (sys_platform == 'linux') and extra == 'cpu'
"""
GOOD = {
    "headrace_sample/__init__.py": "",
    "headrace_sample/py.typed": "",
    "headrace_sample-0.1.0.dist-info/METADATA": METADATA,
    "headrace_sample-0.1.0.dist-info/licenses/LICENSE": "",
}


def write_wheel(folder, files):
    wheel = folder / "headrace_sample-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_a_good_wheel_passes(check_wheels, member, tmp_path):
    """A typed, licensed wheel that requires what is declared passes, in whatever spelling."""
    check_wheels.check_contents(member, write_wheel(tmp_path, GOOD))


@pytest.mark.parametrize("missing", ["headrace_sample/py.typed", "headrace_sample-0.1.0.dist-info/licenses/LICENSE"])
def test_a_wheel_must_be_typed_and_licensed(check_wheels, member, tmp_path, missing):
    """A wheel without its type marker or its licence fails by the file's name."""
    wheel = write_wheel(tmp_path, {name: text for name, text in GOOD.items() if name != missing})

    with pytest.raises(check_wheels.CheckFailed, match=missing):
        check_wheels.check_contents(member, wheel)


@pytest.mark.parametrize(
    "stranger", ["tests/test_x.py", "headrace_sample/tests/x.py", "headrace_sample/test_x.py", "x.py"]
)
def test_a_wheel_holds_its_package_only(check_wheels, member, tmp_path, stranger):
    """A wheel with tests, or with anything outside its package, fails by the file's name."""
    wheel = write_wheel(tmp_path, {**GOOD, stranger: ""})

    with pytest.raises(check_wheels.CheckFailed, match=stranger):
        check_wheels.check_contents(member, wheel)


@pytest.mark.parametrize("line", ["Requires-Dist: attrs>=24", "Requires-Dist: attrs>=25\nRequires-Dist: numpy"])
def test_a_wheel_requires_what_is_declared(check_wheels, member, tmp_path, line):
    """A wheel whose requirements differ from the project's fails."""
    metadata = METADATA.replace("Requires-Dist: attrs>=25", line)
    wheel = write_wheel(tmp_path, {**GOOD, "headrace_sample-0.1.0.dist-info/METADATA": metadata})

    with pytest.raises(check_wheels.CheckFailed, match="declared is"):
        check_wheels.check_contents(member, wheel)


def test_siblings_follow_extras(check_wheels):
    """The sibling wheels of a package are all that its requirements lead to, those of asked-for extras included."""
    members = {member.name: member for member in check_wheels.read_members()}
    http_api = members["headrace-http-api"]

    assert check_wheels.siblings(http_api, members, extras=()) == set()
    assert check_wheels.siblings(http_api, members, extras={"chat"}) == {
        "headrace-kvcache",
        "headrace-sampling",
        "headrace-scheduling",
    }
    assert check_wheels.siblings(members["headrace-chat-server"], members, extras=()) == set(members) - {
        "headrace-chat-server",
        "headrace-transcription-server",
    }
