"""Check what `make dist` built: python -m tests.tools.check_dist DIST

The wheel is small and holds the package and its licence alone, its metadata is complete, and its
long description has no link that leads nowhere on a package index.
"""

import email
import pathlib
import re
import sys
import tarfile
import zipfile

PACKAGE = "blackwell_sparsek"
# The goal is 1,000,000 bytes; this keeps the wheel from growing until it is met.
LARGEST_WHEEL = 1_350_000
REQUIRED = ("Name", "Version", "Summary", "Author", "License-Expression", "Keywords", "Classifier")


def problems_of_wheel(path):
    """What is wrong with a wheel."""
    if path.stat().st_size >= LARGEST_WHEEL:
        yield f"{path.name} has {path.stat().st_size} bytes, at most {LARGEST_WHEEL} are expected"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        for name in names:
            if name.split("/")[0] not in (PACKAGE, info):
                yield f"{path.name} has a file outside of the package: {name}"
        for name in (f"{PACKAGE}/py.typed", f"{info}/licenses/LICENSE"):
            if name not in names:
                yield f"{path.name} lacks {name}"
        yield from problems_of_metadata(wheel.read(f"{info}/METADATA").decode())


def problems_of_metadata(text):
    """What is wrong with the METADATA of a wheel."""
    metadata = email.message_from_string(text)
    yield from (f"METADATA has no {field}" for field in REQUIRED if field not in metadata)
    description = metadata.get_payload()
    for link in re.findall(r"\]\(([^)\s]+)\)", description):
        if not re.match(r"https?://", link):
            yield f"the long description has a relative link: {link}"
    if "<!--" in description:
        yield "the long description has a comment"
    if len(description) < 1000:
        yield "the long description is missing"


def problems_of_sdist(path):
    """What is wrong with a source archive."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "long_description.py", "README.md", "LICENSE", "CHANGELOG.md"):
        if name not in names:
            yield f"{path.name} lacks {name}"
    for name in sorted(names):
        if "/" in name and not name.startswith(("src/", "tests/")):
            yield f"{path.name} has a file outside of src and tests: {name}"


def problems(folder):
    """What is wrong with a folder of one wheel and one source archive."""
    wheels, archives = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(archives)) != (1, 1):
        yield f"expected a wheel and a source archive, got {wheels} and {archives}"
    for path in wheels:
        yield from problems_of_wheel(path)
    for path in archives:
        yield from problems_of_sdist(path)


def main(argv):
    """1 if anything is wrong."""
    folder = pathlib.Path(argv[0])
    found = list(problems(folder))
    print("\n".join(found) or f"check_dist: {folder} is in order")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
