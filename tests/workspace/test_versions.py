"""Version coupling: one release train on the minor, patches free (docs/releasing.md)."""

from packaging.requirements import Requirement
from packaging.version import Version


def sibling_requirements(projects):
    for name, project in projects.items():
        extras = project.get("optional-dependencies", {})
        for text in [*project["dependencies"], *(text for texts in extras.values() for text in texts)]:
            requirement = Requirement(text)
            if requirement.name in projects:
                yield name, requirement


def test_all_members_share_one_minor(projects):
    """Major and minor are equal in all members: one train."""
    minors = {Version(project["version"]).release[:2] for project in projects.values()}

    assert len(projects) == 7
    assert len(minors) == 1


def test_sibling_ranges_are_bounded_to_the_minor(projects):
    """A sibling is required as >=0.N.P,<0.(N+1), and the range admits the sibling's current version."""
    seen = 0
    for name, requirement in sibling_requirements(projects):
        current = Version(projects[requirement.name]["version"])
        bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}

        assert set(bounds) == {">=", "<"}, f"{name} requires {requirement}"
        assert Version(bounds[">="]).release[:2] == current.release[:2], f"{name} requires {requirement}"
        assert len(Version(bounds[">="]).release) == 3, f"{name} requires {requirement}"
        assert Version(bounds["<"]).release == (current.major, current.minor + 1), f"{name} requires {requirement}"
        assert current in requirement.specifier, f"{name} requires {requirement}, at hand is {current}"
        seen += 1

    assert seen > 0


def test_every_requirement_has_a_lower_bound(projects):
    """No requirement of a published package is without a floor."""
    for name, project in projects.items():
        extras = project.get("optional-dependencies", {})
        for text in [*project["dependencies"], *(text for texts in extras.values() for text in texts)]:
            operators = {specifier.operator for specifier in Requirement(text).specifier}

            assert operators & {">=", "==", "~="}, f"{name} requires {text!r} without a lower bound"


def test_mlx_is_required_only_where_it_has_a_backend(projects):
    """On Linux mlx comes through the extras cpu, cuda12 and cuda13, which a package has together or not at all."""
    for name, project in projects.items():
        plain = [Requirement(text) for text in project["dependencies"] if Requirement(text).name == "mlx"]
        extras = set(project.get("optional-dependencies", {})) & {"cpu", "cuda12", "cuda13"}

        assert all(str(requirement.marker) == 'sys_platform == "darwin"' for requirement in plain), name
        assert extras in (set(), {"cpu", "cuda12", "cuda13"}), name
        assert not plain or extras, f"{name} requires mlx and offers no backend for Linux"


def test_development_tools_stay_out_of_the_packages(projects):
    """mlx-lm, openai and the test tools belong to the test group: no package asks for them."""
    development = {"mlx-lm", "openai", "pytest", "hypothesis", "pytest-asyncio", "pytest-timeout"}
    for name, project in projects.items():
        extras = project.get("optional-dependencies", {})
        texts = [*project["dependencies"], *(text for group in extras.values() for text in group)]

        assert not {Requirement(text).name for text in texts} & development, name
