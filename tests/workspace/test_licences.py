"""Licences: a wheel carries its own copy, and the copies are equal."""


def test_every_member_carries_the_same_licence(repository, member_folders):
    """A wheel's licence cannot lie above its project, so each member has a copy; all equal the root's."""
    original = (repository / "LICENSE").read_bytes()

    assert b"Apache License" in original
    for folder in member_folders:
        assert (folder / "LICENSE").read_bytes() == original, folder.name


def test_every_member_declares_it(projects):
    """Each project names the licence and ships the file."""
    for name, project in projects.items():
        assert project["license"] == "Apache-2.0", name
        assert project["license-files"] == ["LICENSE"], name


def test_every_member_is_typed_documented_and_has_a_history(member_folders):
    """Each member has py.typed, a README that opens with its name, and a changelog that knows its version."""
    for folder in member_folders:
        (module,) = (folder / "src").glob("headrace_*")

        assert (module / "py.typed").is_file(), folder.name
        assert (folder / "README.md").read_text().startswith(f"# {module.name.replace('_', '-')}\n"), folder.name
        assert "\n## 0.1.0" in (folder / "CHANGELOG.md").read_text(), folder.name
