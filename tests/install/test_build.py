"""What ``python -m build`` makes: the version of the tag, and the package's files and nothing else."""

import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from environments import PACKAGES, Environment, run
from pages import ROOT

pytestmark = pytest.mark.timeout(300)

# Of what the repository holds, one file of each kind that must not be in what is built is enough.
COPIED = ["CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", ".gitignore", "Makefile", "docs/index.md"]
COPIED += ["tests/README.md", "examples/plain_loop.py"]
COMMIT = [
    "git",
    "-c",
    "user.name=a",
    "-c",
    "user.email=a@b",
    "-c",
    "commit.gpgsign=false",
    "commit",
    "--quiet",
]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What ``python -m build`` would make for each build anew."""
    made = Environment(tmp_path_factory.mktemp("builder") / "venv")
    made.install("build", *tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    return made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clone of one commit, without a tag."""
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run(["git", "init", "--quiet"], folder)
    run(["git", "add", "."], folder)
    run([*COMMIT, "--message", "all"], folder)
    return folder


def built(builder: Environment, source: Path, *options: str) -> list[str]:
    """The names of what was built, in ``dist``."""
    run(
        [builder.python, "-m", "build", "--no-isolation", "--outdir", source / "dist", *options, source],
        source,
    )
    return sorted(path.name for path in (source / "dist").iterdir())


def in_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_source() -> set[str]:
    """The files of the package in this repository, and the one beside it that starts the command."""
    inside = [path for path in (ROOT / "src/paceline").rglob("*") if path.is_file()]
    files = {path.relative_to(ROOT / "src") for path in (*inside, ROOT / "src/paceline_command.py")}
    return {str(path) for path in files if "__pycache__" not in path.parts}


def test_a_tagged_commit_has_the_version_of_its_tag(
    builder: Environment, repository: Path, tmp_path: Path
) -> None:
    run(["git", "tag", "v1.2.3"], repository)
    sdist, wheel = "paceline-1.2.3.tar.gz", "paceline-1.2.3-py3-none-any.whl"
    assert built(builder, repository) == [wheel, sdist]
    from_sdist = in_wheel(repository / "dist" / wheel)
    assert "\nVersion: 1.2.3\n" in from_sdist["paceline-1.2.3.dist-info/METADATA"].decode()

    with tarfile.open(repository / "dist" / sdist) as archive:
        names = {name.removeprefix("paceline-1.2.3/") for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    wanted = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names == wanted | {f"src/{name}" for name in in_source()}

    # Neither git nor the repository is needed to build from an sdist, and the wheels are equal in every byte.
    (repository / "dist" / wheel).unlink()
    built(builder, repository, "--wheel")
    assert in_wheel(repository / "dist" / wheel) == from_sdist
    assert built(builder, tmp_path / "paceline-1.2.3", "--wheel") == [wheel]


def test_a_wheel_has_the_package_its_data_and_the_extra_all(builder: Environment, repository: Path) -> None:
    [wheel] = built(builder, repository, "--wheel")
    content = in_wheel(repository / "dist" / wheel)
    names = {name for name in content if ".dist-info/" not in name}
    assert names == in_source()
    assert {"paceline/py.typed", "paceline/tools/report/page/template.html"} <= names

    [said] = [text.decode() for name, text in content.items() if name.endswith(".dist-info/METADATA")]
    extras: dict[str, set[str]] = {
        extra: set() for extra in re.findall(r"^Provides-Extra: (.*)$", said, re.M)
    }
    for package, extra in re.findall(r"^Requires-Dist: (.*); extra == '(.*)'$", said, re.M):
        extras[extra].add(package)
    everything = extras.pop("all")
    assert everything == set().union(*(extras[name] for name in extras.keys() - {"dev", "docs"}))
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {package.partition("[")[0] for package in everything} < pinned


def test_other_commits_have_development_versions(builder: Environment, repository: Path) -> None:
    [untagged] = built(builder, repository, "--wheel")
    assert re.fullmatch(r"paceline-0\.0\.0\.dev1\+g[0-9a-f]+-py3-none-any\.whl", untagged)

    run(["git", "tag", "v1.2.3"], repository)
    run([*COMMIT, "--allow-empty", "--message", "after"], repository)
    (repository / "dist" / untagged).unlink()
    [later] = built(builder, repository, "--wheel")
    assert re.fullmatch(r"paceline-1\.2\.4\.dev1\+g[0-9a-f]+-py3-none-any\.whl", later)

    shutil.rmtree(repository / ".git")  # as in a folder that was downloaded as a zip file
    (repository / "dist" / later).unlink()
    assert built(builder, repository, "--wheel") == ["paceline-0.0.0.dev0-py3-none-any.whl"]


def test_an_editable_install_has_the_version_too(
    builder: Environment, repository: Path, tmp_path: Path
) -> None:
    run(["git", "tag", "v1.2.3"], repository)
    editable = Environment(tmp_path / "editable", linked=(builder.packages, PACKAGES))
    editable.install("--no-deps", "--no-build-isolation", "--editable", repository)
    asked = "import paceline; print(paceline.__version__, paceline.__file__)"
    said = run([editable.python, "-c", asked], tmp_path, editable.variables())
    assert said.split() == ["1.2.3", str(repository / "src/paceline/__init__.py")]
