"""The tool of `make mutants`: which faults it plants, and that it tells the truth about them."""

import ast
import json
import subprocess

import pytest

from . import mutants
from .mutations import apply, mutants_of

CHANGES = {
    "x = a < b <= c": ["x = (a <= b <= c)", "x = (a < b < c)"],
    "x = a is not b": ["x = (a is b)"],
    "x = a + b": ["x = (a - b)"],
    "x = a // 2": ["x = (a * 2)", "x = a // 3"],
    "x = a and b or c": ["x = ((a and b) and c)", "x = (a or b) or c"],
    "x = not a": ["x = (a)"],
    "x = True": ["x = False"],
    "x = zip(a, strict=False)": ["x = zip(a, strict=True)"],
    "x = 0.0": ["x = 1.0"],
    "f(a, b, key=c)": ["f(b, a, key=c)", "pass"],
    "if a:\n    b()\nelse:\n    c()": [
        "if False:\n    b()\nelse:\n    c()",
        "if a:\n    pass\nelse:\n    c()",
        "if a:\n    b()\nelse:\n    pass",
    ],
    "x = a if b else c": ["x = (c)"],
    "def f():\n    raise E": ["def f():\n    pass"],
    "def f():\n    return a": ["def f():\n    return None"],
    "x = 'µ' + f(a)\ny = a - b": ["x = 'µ' + f(a)\ny = (a + b)"],
}


@pytest.mark.parametrize("source", CHANGES)
def test_every_fault_is_one_change_of_the_text(source):
    assert sorted(apply(source, x) for x in mutants_of(source)) == sorted(CHANGES[source])


@pytest.mark.parametrize(
    "source",
    [
        '"""1 + 1"""',
        "def f(x: tuple[1, 2]) -> a[3]:\n    return None",
        "import a\nfrom b import c",
        "x = f'{a + 1}'",
        "__all__ = [1]",
        "if TYPE_CHECKING:\n    a()",
        "x = isinstance(a, b)",
        "x = max(a, b)",
        "x = torch.maximum(a, b)",
        "assert a == b",
        "x = zip(a, strict=True)",
        "tl.static_assert(a == b)",
        "x = f(a, a)",
    ],
)
def test_what_no_test_should_notice_stays(source):
    assert mutants_of(source) == []


@pytest.fixture(scope="module")
def sites():
    return mutants.all_sites()


@pytest.mark.exhaustive
def test_mutants_of_the_package_can_be_compiled(sites):
    for site in sites[::197]:
        source = (mutants.REPOSITORY / mutants.SOURCE / site.path).read_text()
        broken = apply(source, site.mutant)
        ast.parse(broken)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source)), site
        assert mutants.diff_of(source, site.mutant)


def test_samples_are_repeatable_and_balanced(sites):
    some = mutants.sample(sites, 3, 45)
    assert some == mutants.sample(sites, 3, 45) != mutants.sample(sites, 4, 45)
    assert some[:20] == mutants.sample(sites, 3, 20)
    operators = [site.mutant.operator for site in some]
    assert {operators.count(operator) for operator in operators} == {5}


def test_every_target_has_tests_and_they_exist(sites):
    for path in {site.path for site in sites}:
        tests = mutants.tests_for(path)
        assert tests and all((mutants.REPOSITORY / test).is_file() for test in tests), path
    assert mutants.tests_for("device/fp8.py")[-1] == "tests/decode/test_triton.py"
    assert mutants.tests_for("decode/op.py")[0] == "tests/decode/test_op.py"


def test_tests_that_import_a_file_come_last():
    *fallbacks, first, second = mutants.tests_for("decode/triton.py")
    assert fallbacks[:2] == ["tests/decode/test_triton.py", "tests/decode/test_variants.py"]
    assert (first, second) == ("tests/decode/test_combine.py", "tests/decode/test_latent.py")


def test_known_equivalents_are_mutants_of_these_files(sites):
    known = mutants.equivalents()
    found = set()
    for site in sites:
        if any(name == site.path for name, *_ in known):
            source = (mutants.REPOSITORY / mutants.SOURCE / site.path).read_text()
            found.add((site.path, *mutants.diff_of(source, site.mutant)))
    assert known - found == set()


def test_an_equivalent_needs_a_reason(tmp_path):
    file = tmp_path / "x.txt"
    file.write_text("# text\na.py\n- x < 1\n+ x <= 1\nwhy: x is odd\n\nb.py\n- y\n+ z\n")
    with pytest.raises(SystemExit, match=r"b\.py: expected lines of a diff, then `why: ...`"):
        mutants.equivalents(file)
    file.write_text(file.read_text().split("\n\n")[0])
    assert mutants.equivalents(file) == {("a.py", "- x < 1", "+ x <= 1")}


A = """
def limit(x):
    if x > 10:
        return 10
    return x


def countdown(n):
    while n:
        n = n - 1
    return n
"""
TESTS = """
import pytest

from blackwell_sparsek.masks.a import countdown, limit


@pytest.mark.parametrize("x", [3], ids=["x - 3 of y"])
def test_limit(x):
    assert limit(x) == 3 and limit(11) == 10


def test_countdown():
    assert countdown(3) == 0
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A repository with one file, whose tests do not look at the limit itself."""
    root = tmp_path / "repository"
    files = {
        "src/blackwell_sparsek/__init__.py": "",
        "src/blackwell_sparsek/masks/__init__.py": "",
        "src/blackwell_sparsek/masks/a.py": A,
        "tests/masks/test_a.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["gpu", "exhaustive"]\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(mutants, "FALLBACKS", {})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return root


def run(root, out, chosen, timeout=60.0):
    sites = mutants.all_sites(root)
    with mutants.Bench(root, timeout) as bench:
        answers, text = mutants.run_sample(sites, [x for x in sites if chosen(x)], out, bench)
        assert (bench.copy / mutants.SOURCE / "masks/a.py").read_text() == A
    return {a["place"] + " " + a["operator"]: a["outcome"] for a in answers}, text


def test_a_run_tells_killed_from_survived_and_goes_on(planted, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    comparison, early = "comparison swapped", "returned early"

    def chosen(site):
        return site.mutant.operator in (comparison, early) and site.mutant.line < 8

    answers, text = run(planted, out, chosen)
    place = "masks/a.py"
    assert answers == {f"{place}:3 {comparison}": "survived", f"{place}:5 {early}": "killed"}
    assert (
        "survived: masks/a.py:3: comparison swapped\n    - if x > 10:\n    + if (x >= 10):" in text
    )
    assert "mutants sampled: 1 killed, 1 survived, 0 timed out" in text and "killed 50.0%" in text
    # what was answered stays, a line that was cut off does not
    with out.open("a") as file:
        file.write('{"mutant": "masks/a')
    ran = []
    original = mutants.Bench.run
    monkeypatch.setattr(mutants.Bench, "run", lambda self, x: ran.append(x) or original(self, x))
    assert run(planted, out, chosen) == (answers, text) and not ran
    # a better test is asked again
    (planted / "tests/masks/test_a.py").write_text(TESTS + "    assert limit(10) is 10\n")
    run(planted, out, chosen)
    assert len(ran) == 2
    known = tmp_path / "known.txt"
    known.write_text("masks/a.py\n- if x > 10:\n+ if (x >= 10):\nwhy: 10 either way\n")
    monkeypatch.setattr(mutants.equivalents, "__defaults__", (known,))
    answers, text = run(planted, out, chosen)
    assert answers[f"{place}:3 {comparison}"] == "equivalent"
    assert "1 killed, 0 survived" in text and "1 equivalent" in text


@pytest.mark.exhaustive
def test_a_loop_without_end_is_a_timeout(planted, tmp_path):
    answers, text = run(
        planted,
        tmp_path / "x.jsonl",
        lambda site: site.mutant.operator == "arithmetic swapped",
        timeout=8.0,
    )
    assert list(answers.values()) == ["timeout"] and "1 timed out" in text


def test_a_test_that_fails_anyway_kills_nothing(planted, tmp_path):
    file = planted / "tests/masks/test_a.py"
    file.write_text(TESTS.replace("limit(x) == 3", "limit(x) == 4"))
    answers, text = run(
        planted, tmp_path / "x.jsonl", lambda site: site.mutant.operator == "comparison swapped"
    )
    assert list(answers.values()) == ["unconfirmed"]
    assert (
        "unconfirmed: masks/a.py:3: comparison swapped (tests/masks/test_a.py::test_limit" in text
    )


def test_answers_are_kept_line_by_line(tmp_path):
    out = tmp_path / "x.jsonl"
    assert mutants.read_answers(out) == {}
    out.write_text(json.dumps({"mutant": "a", "outcome": "killed"}) + "\n" + '{"mutant"')
    assert list(mutants.read_answers(out)) == ["a"]


@pytest.mark.parametrize(("killed", "of"), [(0, 0), (0, 9), (9, 9), (45, 50)])
def test_the_interval_holds_the_share(killed, of):
    low, high = mutants.interval(killed, of)
    assert -1e-9 <= low <= (killed / of if of else 0.5) <= high + 1e-9 <= 1 + 2e-9
    assert of == 0 or high - low < 0.4
