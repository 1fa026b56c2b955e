"""Every code block in the pages of the documentation runs, and every command in them exists.

The Python blocks of a page run one after the other in one namespace, in an empty folder. If a page
loads "my-model", that folder holds a tiny Llama with random weights. A comment that begins with
`<!-- python` holds code that runs as well but is not shown: what an example takes for granted.
"""

import doctest
import pathlib
import re
import shlex
from typing import NamedTuple

import pytest
import torch

from blackwell_sparsek.bench.cli import parser as bsk_parser

REPOSITORY = pathlib.Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
# What a block may be: run, checked as commands, or not code at all.
LANGUAGES = {"python", "pycon", "bash", "text", "toml", "yaml"}
MODEL = "my-model"


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks_of(text):
    """The fenced blocks of a page and its unseen Python, in order."""
    fence = r"^```(?P<language>\S*)\n(?P<shown>.*?)^```$"
    unseen = r"^<!-- python\n(?P<unseen>.*?)^-->$"
    found = re.finditer(f"{fence}|{unseen}", text, re.DOTALL | re.MULTILINE)
    for block in found:
        line = text.count("\n", 0, block.start()) + 1
        if block["unseen"] is not None:
            yield Block("python", line, block["unseen"])
        else:
            yield Block(block["language"], line, block["shown"])


def run(page, text, names):
    """Run the Python of a page; a failure points to the line in the page."""
    for block in blocks_of(text):
        if block.language == "python":
            # so that tracebacks and the line of an error are those of the page
            code = "\n" * block.line + block.text
            exec(compile(code, str(page), "exec"), names)
        elif block.language == "pycon":
            session = doctest.DocTestParser().get_doctest(
                block.text, names, page.name, str(page), block.line
            )
            output = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            failed = runner.run(session, out=output.append, clear_globs=False).failed
            assert not failed, "".join(output)
            names.update(session.globs)


def commands_of(text):
    """The commands of the bash blocks, continued lines joined, without comments."""
    for block in blocks_of(text):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words = words[1:]  # an environment variable before the command
                if words:
                    yield words


def extras_of(metadata):
    """Names of the optional dependencies; Python 3.10 has nothing to read TOML with."""
    _, rest = metadata.split("[project.optional-dependencies]\n")
    return re.findall(r"^([\w-]+) = \[", rest.split("\n[")[0], re.MULTILINE)


def why_not(words):
    """What is wrong with a command, or None. Other people's commands are not looked at."""
    makefile = (REPOSITORY / "Makefile").read_text()
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
        unknown = [w for w in words[1:] if "=" not in w and w not in targets]
        return f"no such target: {unknown}" if unknown else None
    if words[:3] == ["python", "-m", "blackwell_sparsek"]:
        words = ["bsk", *words[3:]]
    if words[0] == "bsk":
        try:
            bsk_parser().parse_args(words[1:])
        except SystemExit as error:
            return f"bsk refuses it ({error.code})"
    if words[:2] == ["python", "-m"] and words[2].startswith(("blackwell_sparsek.", "tests.")):
        root = REPOSITORY / "src" if words[2].startswith("blackwell") else REPOSITORY
        path = root / words[2].replace(".", "/")
        exists = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        return None if exists else f"no such module: {words[2]}"
    if words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        return None if (REPOSITORY / words[1]).exists() else f"no such file: {words[1]}"
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"(?:^|\s)(?:\.|blackwell-sparsek)\[([\w,]+)\]", " ".join(words))
        unknown = {e for found in extras for e in found.split(",")}
        unknown -= set(extras_of((REPOSITORY / "pyproject.toml").read_text()))
        return f"no such extra: {unknown}" if unknown else None
    return None


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


def with_code(page):
    return any(block.language in ("python", "pycon") for block in blocks_of(page.read_text()))


@pytest.mark.parametrize("page", [*filter(with_code, PAGES)], ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    text = page.read_text()
    for module in ("jax", "transformers"):
        if f"import {module}" in text or f"from {module}" in text:
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    if MODEL in text:
        (tmp_path / MODEL).symlink_to(request.getfixturevalue("tiny_llama"))
    torch.manual_seed(0)
    try:
        run(page, text, {"__name__": "__main__", "__file__": str(page)})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are_and_commands_exist(page):
    text = page.read_text()
    unknown = {b.line: b.language for b in blocks_of(text) if b.language not in LANGUAGES}
    assert unknown == {}, "say python, pycon, bash, text, toml or yaml after ```"
    wrong = {shlex.join(words): why_not(words) for words in commands_of(text)}
    assert {command: reason for command, reason in wrong.items() if reason} == {}


def test_the_first_screen_of_the_readme_names_the_gpus():
    from blackwell_sparsek.bench.support import TIMED
    from blackwell_sparsek.testing.compile_cases import ALL_ARCHS

    head = " ".join((REPOSITORY / "README.md").read_text().split("```")[0].split())
    (run,) = re.findall(r"on the H200 \((.*?)\) only", head)
    assert run == ", ".join(f"sm_{sm}" for sm in TIMED)
    (compiled,) = re.findall(r"for (sm_\d+(?:(?:, | and )sm_\d+)+) too", head)
    others = [sm for sm in ALL_ARCHS if sm not in TIMED]
    assert re.findall(r"\d+", compiled) == [str(sm) for sm in others]


def test_the_readme_has_one_screen_before_its_figures():
    before = (REPOSITORY / "README.md").read_text().split("## Figures")[0]
    assert len(before.splitlines()) <= 50


def test_planted_faults_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\na = 1\n```\n\n<!-- python\nb = a\n-->\n```bash\nmake x\n```\n"
    )
    names = {}
    run(page, page.read_text(), names)
    assert names["b"] == 1 and [b.line for b in blocks_of(page.read_text())] == [3, 7, 10]
    with pytest.raises(ZeroDivisionError) as error:
        run(page, "text\n```python\nx = 1\n1 / 0\n```\n", {})
    assert error.traceback[-1].lineno + 1 == 4
    with pytest.raises(AssertionError, match="Expected"):
        run(page, "```pycon\n>>> 1 + 1\n3\n```\n", {})
    for command, reason in (
        ("make nothing", "no such target: ['nothing']"),
        ("bsk nothing", "bsk refuses it (2)"),
        ("BSK_IMPL=eager python -m blackwell_sparsek bench --nothing", "bsk refuses it (2)"),
        ("python -m blackwell_sparsek.nothing", "no such module: blackwell_sparsek.nothing"),
        ("python examples/nothing.py", "no such file: examples/nothing.py"),
        ("pip install '.[nothing]'", "no such extra: {'nothing'}"),
    ):
        (words,) = commands_of(f"```bash\n{command}  # a comment\n```\n")
        assert why_not(words) == reason
