"""A name of the package means one thing: no class and no file name is there twice."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src/paceline"

# Files that are meant to have the same name, with the reason.
SAME_FILE_NAMES = {
    "__init__.py": "Python's",
    "command.py": "the command line of each folder in tools/",
    "wrapper.py": "the wrapper of ddp/ and of data_parallel/",
    "parallel_apply.py": "nn/parallel/ has torch's module paths",
    "replicate.py": "nn/parallel/ has torch's module paths",
    "scatter_gather.py": "nn/parallel/ has torch's module paths",
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def classes(file: Path) -> list[str]:
    """The classes at the top level of a file."""
    return [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def in_several_places(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, file in names:
        places[name].append(str(file.relative_to(PACKAGE)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_files_have_the_same_name() -> None:
    repeated = in_several_places((file.name, file) for file in files())
    assert {name: found for name, found in repeated.items() if name not in SAME_FILE_NAMES} == {}


def test_every_file_name_that_may_repeat_does() -> None:
    assert {*SAME_FILE_NAMES} <= {*in_several_places((file.name, file) for file in files())}


def test_no_two_classes_have_the_same_name() -> None:
    # An underscore makes a name private, but not another word.
    repeated = in_several_places((name.lstrip("_"), file) for file in files() for name in classes(file))
    assert repeated == {}
